#!/usr/bin/env python3
"""Where a layer of a decode step spends its time, from the marks that a build with -DWINNOW_CUDA_TIMELINE=ON wrote.

    timeline.py FILE [--layers N]

FILE has a line for each mark that block 0 of a kernel passed: nanoseconds, source file, line, and 1 where the kernel stands
ready and waits. A layer is what lies between two marks of the kernel that runs once in it (the one that makes codes, as a rule).
Of the most frequent kind of layer, at most N (default 400) from the middle of the file: each mark with the median time since the
layer began, in that order, and since the mark before it.
"""

import argparse
import collections
import functools
import pathlib
import re
import statistics
import sys


@functools.cache
def source(path):
    """Of the file of that name here: the marks may come from another machine."""
    return (pathlib.Path(__file__).parent.parent / "kernels/cuda" / pathlib.Path(path).name).read_text().splitlines()


def label(path, line, waits):
    """What stands at a mark: the kernel, and the mark's own words."""
    lines = source(path)
    kernel = next((m[1] for i in range(line - 1, -1, -1) if (m := re.search(r"(\w+Kernel)\(const", lines[i]))), "?")
    words = re.search(r'WINNOW_TIMELINE_MARK\("([^"]*)"\)', lines[line - 1])
    what = words[1] if words else "stands ready" if waits else "may read what came before"
    return f"{pathlib.Path(path).name}, {kernel}: {what}"


def layers_of(marks):
    """Marks of each layer, as {(mark, how often before in this layer): time}."""
    counts = collections.Counter(mark for _, mark in marks if not mark[2])
    # Products run several times in a layer, and what runs in few layers is none of it: of the rest the rarest mark, and of
    # several the first by name.
    often = max(counts.values())
    begin = min((mark for mark, n in counts.items() if n * 8 >= often), key=lambda mark: (counts[mark], mark))
    found = []
    for time, mark in marks:
        if mark == begin:
            found.append({})
            seen = collections.Counter()
        if found:
            found[-1][mark, seen[mark]] = time
            seen[mark] += 1
    return found[:-1]


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("file")
    arguments.add_argument("--layers", type=int, default=400)
    options = arguments.parse_args()
    marks = []
    for text in open(options.file):
        time, path, line, waits = text.split()
        marks.append((int(time), (path, int(line), int(waits))))
    if not marks:
        sys.exit(f"{options.file} has no marks")
    marks.sort()
    # Each file keeps its last marks: from where all of them have some.
    begins = {}
    for time, (path, _, _) in marks:
        begins.setdefault(path, time)
    last = {path: time for time, (path, _, _) in marks}
    end = marks[-1][0]
    begin = max(time for path, time in begins.items() if end - last[path] < 1e9)
    layers = layers_of([mark for mark in marks if mark[0] >= begin])
    if not layers:
        sys.exit("no mark comes again")
    kind, _ = collections.Counter(frozenset(layer) for layer in layers).most_common(1)[0]
    same = [layer for layer in layers if frozenset(layer) == kind]
    middle = len(same) // 2
    same = same[max(0, middle - options.layers // 2):][:options.layers]
    since = {mark: statistics.median(layer[mark] - min(layer.values()) for layer in same) / 1e3 for mark in kind}
    print(f"{len(same)} layers of {len(kind)} marks, median us: since the mark before, since the layer began")
    before = 0.0
    for mark in sorted(kind, key=since.get):
        print(f"{since[mark] - before:7.2f} {since[mark]:7.2f}  {label(*mark[0])}")
        before = since[mark]


if __name__ == "__main__":
    main()
