#!/usr/bin/env bash
# Puts the program with the shared libraries that it needs into one folder, to run on a machine that has none of them:
#
#   scripts/bundle.sh [--program FILE] OUT
#
# OUT/winnow finds its libraries in OUT/lib (RPATH $ORIGIN/lib). Left out is what belongs to the machine: the C library
# and the NVIDIA driver's libraries; CUDA's runtime is linked in. Without --program builds the preset cuda first. The
# machine needs a C library as new as this one's, and for --device cuda a driver.
set -euo pipefail

program=
if [ "${1:-}" = --program ]; then
  program=$(realpath "$2")
  shift 2
fi
[ $# -eq 1 ] || { echo "usage: scripts/bundle.sh [--program FILE] OUT" >&2; exit 2; }
out=$(realpath -m "$1")
cd "$(dirname "$0")/.."
if [ -z "$program" ]; then
  scripts/build.sh cuda winnow
  program=$PWD/build/cuda/winnow
fi
[[ $(readelf -d "$program") == *'[$ORIGIN/lib]'* ]] || { echo "bundle.sh: $program has no RPATH of \$ORIGIN/lib" >&2; exit 1; }

rm -rf "$out/lib" "$out/winnow"
mkdir -p "$out/lib"
# deploy/install.cmake lists the program's files; a folder needs no bin.
build=$(dirname "$program")
stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
[ -f "$build/cmake_install.cmake" ] || { echo "bundle.sh: $program is not in a folder that CMake built" >&2; exit 1; }
cmake --install "$build" --component program --prefix "$stage" --strip >/dev/null
[ "$(ls "$stage/bin")" = winnow ] || { echo "bundle.sh: deploy/install.cmake installs more programs than winnow: $(ls "$stage/bin")" >&2; exit 1; }
install -m 755 "$stage/bin/winnow" "$out/winnow"
ldd "$program" | awk '/not found/ { print "bundle.sh: " $1 " is missing" > "/dev/stderr"; exit 1 }'
ldd "$program" | awk '$2 == "=>" { print $1, $3 }' | while read -r name path; do
  case $name in
    libc.so.* | libm.so.* | libdl.so.* | librt.so.* | libpthread.so.* | libresolv.so.*) continue ;;
    libcuda.so.* | libnvidia-*) continue ;;
  esac
  install -m 644 "$path" "$out/lib/$name"
  strip --strip-unneeded "$out/lib/$name"
done

# Every library but the machine's comes from the folder, as in an environment that names no other.
env -i ldd "$out/winnow" | awk -v lib="$out/lib/" '
  $2 == "=>" && index($3, lib) != 1 && $1 !~ /^lib(c|m|dl|rt|pthread|resolv)\.so/ { print "bundle.sh: " $1 " comes from " $3 > "/dev/stderr"; bad = 1 }
  END { exit bad }'
env -i "$out/winnow" --version >/dev/null
echo "$out: $(du -sh "$out" | cut -f1), $(ls "$out/lib" | wc -l) libraries"
