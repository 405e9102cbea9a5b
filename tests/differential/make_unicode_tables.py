#!/usr/bin/env python3
"""Writes engine/text/unicode/unicode_tables.cc: where the reference's Unicode data and the libraries' differ.

The reference (PyPI `tokenizers`) knows Unicode 16 in its regexes, 17 in its digit test and 9 in its
normalisation forms; Debian's PCRE2 10.42 knows 14 and utf8proc 2.8 knows 15. This script asks all of
them about every code point and writes the differences as ranges. It takes a few minutes.

    pip install -r requirements.txt; ./make_unicode_tables.py > ../../engine/text/unicode/unicode_tables.cc
"""
import ctypes
import ctypes.util
import sys
import unicodedata

import tokenizers
from tokenizers import Regex, normalizers, pre_tokenizers

CATEGORIES = ("Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So Zs Zl Zp Cc Cf Co Cn"
              .split())
CODE_POINTS = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
PCRE2_UTF, PCRE2_UCP, PCRE2_NO_UTF_CHECK = 0x00080000, 0x00020000, 0x40000000


def reference_class(pattern):
    normalizer = normalizers.Replace(Regex(pattern), "XX")
    return {c for c in CODE_POINTS if normalizer.normalize_str(chr(c)) == "XX"}


def pcre2_class(lib, pattern):
    error, offset = ctypes.c_int(), ctypes.c_size_t()
    code = lib.pcre2_compile_8(pattern.encode(), len(pattern), PCRE2_UTF | PCRE2_UCP,
                               ctypes.byref(error), ctypes.byref(offset), None)
    data = lib.pcre2_match_data_create_8(2, None)
    found = set()
    for c in CODE_POINTS:
        text = chr(c).encode()
        if lib.pcre2_match_8(code, text, len(text), 0, PCRE2_NO_UTF_CHECK, data, None) > 0:
            found.add(c)
    return found


def ranges(code_points):
    out = []
    for c in sorted(code_points):
        if out and out[-1][1] == c - 1:
            out[-1][1] = c
        else:
            out.append([c, c])
    return out


def print_ranges(name, comment, code_points):
    print(f"// {comment}")
    found = ranges(code_points)
    print(f"constexpr CodePointRange {name}[] = {{")
    for lo, hi in found:
        print(f"    {{0x{lo:X}, 0x{hi:X}}},")
    print("};\n")


def main():
    pcre2 = ctypes.CDLL(ctypes.util.find_library("pcre2-8"))
    pcre2.pcre2_compile_8.restype = ctypes.c_void_p
    pcre2.pcre2_match_data_create_8.restype = ctypes.c_void_p
    pcre2.pcre2_match_8.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t,
                                    ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p]
    utf8proc = ctypes.CDLL(ctypes.util.find_library("utf8proc"))

    class Property(ctypes.Structure):  # the leading fields of utf8proc_property_t
        _fields_ = [("category", ctypes.c_int16), ("combining_class", ctypes.c_int16),
                    ("bidi_class", ctypes.c_int16), ("decomp_type", ctypes.c_int16),
                    ("decomp_seqindex", ctypes.c_uint16)]
    utf8proc.utf8proc_get_property.restype = ctypes.POINTER(Property)
    utf8proc.utf8proc_version.restype = ctypes.c_char_p

    category = {}
    changed = {}
    for name in CATEGORIES:
        print(name, file=sys.stderr)
        of_reference = reference_class(r"\p{%s}" % name)
        of_pcre2 = pcre2_class(pcre2, r"\p{%s}" % name)
        for c in of_reference:
            category[c] = name
        for c in of_reference - of_pcre2:
            changed[c] = name

    numeric = {c for c in CODE_POINTS
               if len(pre_tokenizers.Digits(individual_digits=True).pre_tokenize_str("A" + chr(c) + "A")) == 3}
    late_numeric = {c for c in numeric if category[c][0] != "N"}
    assert all(c in numeric for c in CODE_POINTS if category[c][0] == "N")

    # A character that the reference does not know stands alone in its normalisation: it neither
    # reorders, decomposes nor composes.
    nfd, nfkd = normalizers.NFD(), normalizers.NFKD()
    # U+11A7 lies before the first trailing consonant of Hangul; utf8proc 2.8 composes it all the same.
    inert, inert_compat = {0x11A7}, set()
    for c in CODE_POINTS:
        prop = utf8proc.utf8proc_get_property(ctypes.c_int32(c)).contents
        ch = chr(c)
        if prop.combining_class != 0 and nfd.normalize_str(ch) == ch:
            reorders = (nfd.normalize_str("a\u0345" + ch) != "a\u0345" + ch or
                        nfd.normalize_str("a" + ch + "\u0334") != "a" + ch + "\u0334")
            if not reorders and prop.combining_class not in (1, 240):
                inert.add(c)
        if prop.decomp_seqindex != 0xFFFF:
            # 0 of decomp_type is canonical. Hangul is decomposed by rule, not by table.
            if prop.decomp_type == 0 and nfd.normalize_str(ch) == ch:
                inert.add(c)
                inert.update(ord(part) for part in unicodedata.normalize("NFD", ch))
            elif nfkd.normalize_str(ch) == ch:
                inert_compat.add(c)

    print("// Where the reference's Unicode data and the libraries' differ; see the header.")
    print(f"// Written by tests/differential/make_unicode_tables.py: tokenizers {tokenizers.__version__}, "
          f"utf8proc {utf8proc.utf8proc_version().decode()}.")
    print("// Do not edit.")
    print('#include "engine/text/unicode/unicode_tables.h"\n')
    print("namespace winnow::engine {\nnamespace {\n")
    print("// Code points whose general category is another one than in Unicode 14.")
    print("constexpr CategoryRange kCategoryChanges[] = {")
    run = []
    for c in sorted(changed):
        if run and run[-1][1] == c - 1 and run[-1][2] == changed[c]:
            run[-1][1] = c
        else:
            run.append([c, c, changed[c]])
    for lo, hi, name in run:
        print(f'    {{0x{lo:X}, 0x{hi:X}, {{\'{name[0]}\', \'{name[1]}\'}}}},')
    print("};\n")
    print_ranges("kLateNumeric", "Numeric for the digit test alone, which knows a newer Unicode.", late_numeric)
    print_ranges("kInert", "Unknown to the reference's canonical normalisation.", inert)
    print_ranges("kInertCompatibility", "Not decomposed by the reference's compatibility normalisation.",
                 inert_compat)
    print("}  // namespace\n")
    for function, table, kind in (("CategoryChanges", "kCategoryChanges", "CategoryRange"),
                                  ("LateNumeric", "kLateNumeric", "CodePointRange"),
                                  ("Inert", "kInert", "CodePointRange"),
                                  ("InertCompatibility", "kInertCompatibility", "CodePointRange")):
        print(f"std::span<const {kind}> {function}() {{ return {table}; }}")
    print("\n}  // namespace winnow::engine")


if __name__ == "__main__":
    main()
