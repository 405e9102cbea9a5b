#!/usr/bin/env bash
# Fetches the sources of xgrammar (Apache-2.0), which compiles the grammars of structured output, out of its sdist on
# PyPI. They are left in ${XDG_CACHE_HOME:-$HOME/.cache}/winnow; a second call finds them there. The last line of stdout
# is their folder. CMakeLists.txt calls it; without a package index winnow is built without structured output.
set -euo pipefail

version=0.2.8
sdist=xgrammar-$version.tar.gz
sdist_sha256=8305646fd2b319d6c3003f51a1665e54cbbe9cba1fb636bc41d0b46434ccbb80
cache=${XDG_CACHE_HOME:-$HOME/.cache}/winnow
sources=$cache/xgrammar-$version

fail() { echo "fetch_xgrammar.sh: $*" >&2; exit 1; }

# It is put in place whole, after its checksum was right.
if [ -f "$sources/include/xgrammar/xgrammar.h" ]; then
  echo "$sources"
  exit 0
fi
[ $# -eq 0 ] || fail "unknown argument $1"

mkdir -p "$cache"
work=$(mktemp -d "$cache/fetch.XXXXXX")
trap 'rm -rf "$work"' EXIT

# pip is used as it is, or else from an environment of its own; Debian's python3 alone has neither pip nor ensurepip.
pip=(python3 -m pip)
if ! "${pip[@]}" --version >/dev/null 2>&1; then
  python3 -m venv "$work/venv" >"$work/venv.log" 2>&1 ||
    fail "python3 has no pip, and makes no environment with it: install python3-pip or python3-venv"
  pip=("$work/venv/bin/python" -m pip)
fi

# pip asks an sdist for its metadata, for which it fetches the packages that the sdist would be built with.
"${pip[@]}" download --quiet --disable-pip-version-check --retries 1 --timeout 15 --no-deps --no-binary xgrammar \
  --dest "$work" "xgrammar==$version" >"$work/pip.log" 2>&1 ||
  { tail -3 "$work/pip.log" >&2; fail "could not fetch xgrammar $version: is there a network, and a package index?"; }
echo "$sdist_sha256  $work/$sdist" | sha256sum --check --status ||
  fail "$sdist is not the file that was expected (SHA-256 $(sha256sum "$work/$sdist" | cut -d' ' -f1))"

# The C++ core, and what it includes.
tar -xzf "$work/$sdist" -C "$work" --exclude='*/googletest' --exclude='*/cpptrace' "xgrammar-$version/cpp" \
  "xgrammar-$version/include" "xgrammar-$version/3rdparty" "xgrammar-$version/LICENSE" "xgrammar-$version/NOTICE"
# Another call may have been faster: its copy is the same.
mv -T "$work/xgrammar-$version" "$sources" 2>/dev/null || [ -d "$sources" ] || fail "could not write $sources"
echo "$sources"
