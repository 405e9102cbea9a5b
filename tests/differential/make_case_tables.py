#!/usr/bin/env python3
"""Writes engine/text/jinja/case_tables.cc: case mappings of Python's str that utf8proc lacks.

utf8proc maps one code point to one; Python maps some to several (U+00DF to "SS"), and knows another
version of Unicode. This script asks both about every code point and writes the differences.

    ./make_case_tables.py > ../../engine/text/jinja/case_tables.cc
"""
import ctypes
import ctypes.util
import sys
import unicodedata

CODE_POINTS = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]


def main():
    lib = ctypes.CDLL(ctypes.util.find_library("utf8proc"))
    lib.utf8proc_version.restype = ctypes.c_char_p
    print("// Case mappings in which Python's str and utf8proc differ; see unicode.h.")
    print(f"// Written by tests/differential/make_case_tables.py: Unicode {unicodedata.unidata_version}, "
          f"utf8proc {lib.utf8proc_version().decode()}.")
    print("// Do not edit.")
    print('#include "engine/text/jinja/case_tables.h"\n\nnamespace winnow::engine::jinja {\nnamespace {\n')
    for name, python, simple in (("Upper", str.upper, lib.utf8proc_toupper), ("Lower", str.lower, lib.utf8proc_tolower),
                                 ("Title", str.title, lib.utf8proc_totitle)):
        print(f"constexpr CaseMapping k{name}[] = {{")
        for c in CODE_POINTS:
            mapped = python(chr(c))
            if mapped != chr(simple(c)):
                points = [f"0x{ord(m):X}" for m in mapped] + ["0"] * (3 - len(mapped))
                print(f"    {{0x{c:X}, {{{', '.join(points)}}}}},")
        print("};\n")
    print("}  // namespace\n")
    for name in ("Upper", "Lower", "Title"):
        print(f"std::span<const CaseMapping> {name}Mappings() {{ return k{name}; }}")
    print("\n}  // namespace winnow::engine::jinja")


if __name__ == "__main__":
    sys.exit(main())
