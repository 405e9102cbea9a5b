#!/usr/bin/env bash
# clang-format and clang-tidy over the project's C++; prints what is wrong and exits 1, or nothing and exits 0.
#   scripts/lint.sh            check everything (clang-tidy takes minutes)
#   scripts/lint.sh --fix      let clang-format rewrite files; no clang-tidy
#   scripts/lint.sh FILE ...   check these files only
# Debian 12's clang-format 14 and clang-tidy 14 are what the configurations are written for.
set -euo pipefail
cd "$(dirname "$0")/.."

need() { command -v "$1" >/dev/null || { echo "lint.sh: $1 is missing: apt-get install $1" >&2; exit 1; }; }
need clang-format

if [ "${1:-}" = --fix ]; then
  git ls-files -z '*.cc' '*.h' | xargs -0 clang-format -i
  exit 0
fi
if [ $# -gt 0 ]; then
  files=("$@")
else
  mapfile -t files < <(git ls-files '*.cc' '*.h')
fi
clang-format --dry-run -Werror "${files[@]}"

need clang-tidy
scripts/build.sh release winnow_proto >/dev/null  # the generated headers and compile_commands.json
sources=()
for file in "${files[@]}"; do
  case "$file" in *.cc) grep -q "\"$PWD/$file\"" build/release/compile_commands.json && sources+=("$file") ;; esac
done
printf '%s\n' "${sources[@]}" | xargs -P "$(nproc)" -n 4 clang-tidy --quiet -p build/release 2>/dev/null
