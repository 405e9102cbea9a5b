#!/usr/bin/env bash
# Formatters and linters over the project; prints what is wrong and exits 1, or exits 0.
#   scripts/lint.sh                  clang-format over C++ and CUDA, ruff over Python: seconds; CI runs this
#   scripts/lint.sh --fix            the same, but files are rewritten
#   scripts/lint.sh --tidy [FILE ...]   clang-tidy over all C++ (an hour on two cores), or over these files
# Debian 12's clang-format 14 and clang-tidy 14 are what the configurations are written for. ruff comes from PyPI in the
# version of scripts/lint-requirements.txt; without a network it is left out, and the last line says so.
set -euo pipefail
cd "$(dirname "$0")/.."

need() { command -v "$1" >/dev/null || { echo "lint.sh: $1 is missing: apt-get install $1" >&2; exit 1; }; }

# Prints the path of ruff in the pinned version, from .cache; nothing where it cannot be had.
ruff_path() {
  local venv=.cache/lint-venv
  if ! cmp -s scripts/lint-requirements.txt "$venv/requirements.txt"; then
    rm -rf "$venv"
    { python3 -m venv "$venv" && "$venv/bin/pip" install -q --disable-pip-version-check -r scripts/lint-requirements.txt; } >&2 || return 0
    cp scripts/lint-requirements.txt "$venv/requirements.txt"
  fi
  echo "$venv/bin/ruff"
}

tidy() {
  need clang-tidy
  scripts/build.sh release winnow_proto >/dev/null  # the generated headers and compile_commands.json
  local sources=() file
  [ $# -gt 0 ] || mapfile -t files < <(git ls-files '*.cc')
  [ $# -eq 0 ] || files=("$@")
  for file in "${files[@]}"; do
    case "$file" in *.cc) grep -q "\"$PWD/$file\"" build/release/compile_commands.json && sources+=("$file") ;; esac
  done
  [ ${#sources[@]} -gt 0 ] || { echo "lint.sh: no file that is compiled is among these" >&2; exit 1; }
  printf '%s\n' "${sources[@]}" | xargs -P "$(nproc)" -n 4 clang-tidy --quiet -p build/release 2>/dev/null
}

case ${1:-} in
  --tidy)
    shift
    tidy "$@"
    exit
    ;;
  '') format=(--dry-run -Werror) check=() ;;
  --fix) format=(-i) check=(--fix) ;;
  *) sed -n '3,5s/^#   //p' "$0" >&2; exit 2 ;;
esac

need clang-format
result=0
git ls-files -z '*.cc' '*.h' '*.cu' '*.cuh' | xargs -0 -P "$(nproc)" -n 40 clang-format "${format[@]}" || result=1
ruff=$(ruff_path)
if [ -n "$ruff" ]; then
  git ls-files -z '*.py' | xargs -0 "$ruff" check --quiet --force-exclude "${check[@]}" || result=1
else
  echo "lint.sh: Python was not looked at, because ruff could not be installed" >&2
fi
exit $result
