#!/usr/bin/env python3
"""Expectations for tests/unit/engine/transform_fit_test.cc: the fit, the selection and the tail of transform codes in plain
numpy and double precision, written apart from the C++ (docs/retrieval.md, "pca").

    python3 tests/golden/transform_code.py > tests/golden/transform_code.json

Samples are made of integers of a linear congruential generator and powers of two, so that both sides have the same bits.
Positions are not spread here: the C++ has random numbers of its own for that, and a test of its own.
"""
import json
import numpy as np

D, N, GROUP, BITS, SINK, WINDOW, K = 32, 900, 2, 64, 16, 128, 18
STEPS = np.array([0, 1.5958, 0.9957, 0.5860, 0.3352, 0.1881, 0.1041, 0.0569, 0.0308])
ERRORS = np.array([1, 0.3634, 0.1188, 0.03744, 0.01154, 0.00349, 0.00104, 0.000304, 0.0000877])


class Lcg:
    def __init__(self, seed): self.state = seed
    def centred(self):
        """A number in [-1, 1) of 16 bits."""
        self.state = (self.state * 1664525 + 1013904223) % 2**32
        return ((self.state >> 16) - 32768) / 32768


def rows(seed, n, spread, offset):
    """[n, D]: four factors that all dimensions share by turns, noise, and an offset in some dimensions."""
    lcg, out = Lcg(seed), np.zeros((n, D))
    for t in range(n):
        factors = [4 * lcg.centred() for _ in range(4)]
        for c in range(D):
            out[t, c] = factors[c % 4] * 2.0 ** -(c // 8) + spread * lcg.centred() + offset * (c % 16 == 5)
    return out


def main():
    keys, values = rows(1, N, 0.5, 4.0), rows(2, N, 0.25, 0.0)
    queries = rows(3, 300, 1.0, 1.0)
    keys[::7] = keys[::7] / 2  # tokens that differ in weight
    values = values / 2 + keys[:, ::-1] / 4  # like keys have like values

    mean = keys.mean(0)
    moment = queries.T @ queries / len(queries)
    w, u = np.linalg.eigh(moment + 1e-4 * np.trace(moment) / D * np.eye(D))
    root, inverse = (u * np.sqrt(w)) @ u.T, (u / np.sqrt(w)) @ u.T
    centred = (keys - mean) @ root
    variance, v = np.linalg.eigh(centred.T @ centred / N)
    variance, v = variance[::-1], v[:, ::-1]
    a, b = root @ v, inverse @ v

    sums, widths = variance.reshape(-1, 4).sum(1), np.zeros(D // 4, int)
    for _ in range(BITS // 4):
        gain = np.where(widths < 8, sums * (ERRORS[widths] - ERRORS[np.minimum(widths + 1, 8)]), -1)
        widths[gain.argmax()] += 1
    of_dim = np.repeat(widths, 4)
    cells, left = np.zeros(D, int), variance.copy()
    for _ in range(8):
        i = left.argmax()
        cells[i] += 1
        left[i] /= 2.75 if cells[i] == 1 else 4
    cells = np.minimum(cells, of_dim)

    step = np.where(of_dim > 0, STEPS[of_dim] * np.sqrt(variance), 1)
    index = np.clip(np.floor((keys - mean) @ a / step + 2.0 ** (of_dim - 1)), 0, 2.0**of_dim - 1) * (of_dim > 0)
    level = (index - (2.0**of_dim - 1) / 2) * step * (of_dim > 0)
    cell = np.zeros(N, int)
    for i in range(D):
        cell = cell << cells[i] | index[:, i].astype(int) >> (of_dim[i] - cells[i])

    q = queries[-GROUP:]
    exact = q @ keys.T / np.sqrt(D)
    estimate = ((q @ mean)[:, None] + q @ b @ level.T) / np.sqrt(D)
    mid = slice(SINK, N - WINDOW)
    anchors = np.ones(N, bool)
    anchors[mid] = False
    e = np.exp(exact[:, anchors]).sum(1)
    weight = np.exp(estimate[:, mid])
    mass = (weight / (e + weight.sum(1))[:, None]).sum(0)
    selected = np.sort(np.lexsort((-np.arange(len(mass)), -mass))[:K]) + SINK
    read = anchors.copy()
    read[selected] = True
    table, counts, covered = np.zeros((256, D)), np.zeros(256), N // 64 * 64
    np.add.at(table, cell[SINK:covered], values[SINK:covered])
    np.add.at(counts, cell[SINK:covered], 1)
    means = (table + values[SINK:covered].mean(0)) / (counts + 1)[:, None]
    part = np.exp(exact[:, read])
    none = part @ values[read] / part.sum(1)[:, None]
    rest = np.exp(estimate) * ~read
    tail = (part @ values[read] + rest @ means[cell]) / (part.sum(1) + rest.sum(1))[:, None]
    truth = np.exp(exact) @ values / np.exp(exact).sum(1)[:, None]

    def rounded(x): return [float("%.9g" % y) for y in np.ravel(x)]
    print(json.dumps({
        "variance": rounded(variance), "widths": widths[widths > 0].tolist(), "cell_bits": cells[cells > 0].tolist(),
        "anchor_masses": rounded(np.log(e)), "selected": selected.tolist(), "masses_of_selected": rounded(mass[selected - SINK]),
        "least_mass": float(np.sort(mass)[-K]), "next_mass": float(np.sort(mass)[-K - 1]),
        "estimates": rounded(estimate[:, SINK:SINK + 20]), "without_tail": rounded(none), "with_tail": rounded(tail),
        "errors": [float(np.linalg.norm(x - truth)) for x in (none, tail)]}, indent=1))


if __name__ == "__main__":
    main()
