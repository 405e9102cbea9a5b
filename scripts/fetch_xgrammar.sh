#!/usr/bin/env bash
# Fetches the sources of xgrammar (Apache-2.0), which compiles the grammars of structured output, out of its sdist on
# PyPI. They are left in ${XDG_CACHE_HOME:-$HOME/.cache}/winnow; a second call finds them there. The last line of stdout
# is their folder. CMakeLists.txt calls it; without a package index winnow is built without structured output.
set -euo pipefail
source "$(dirname "$0")/pypi.sh"

version=0.2.8
sdist=xgrammar-$version.tar.gz
sdist_sha256=8305646fd2b319d6c3003f51a1665e54cbbe9cba1fb636bc41d0b46434ccbb80
sources=$cache/xgrammar-$version

# It is put in place whole, after its checksum was right.
if [ -f "$sources/include/xgrammar/xgrammar.h" ]; then
  echo "$sources"
  exit 0
fi
[ $# -eq 0 ] || fail "unknown argument $1"

make_work_folder
# pip asks an sdist for its metadata, for which it fetches the packages that the sdist would be built with.
download xgrammar $version $sdist $sdist_sha256 --no-binary xgrammar

# The C++ core, and what it includes.
tar -xzf "$work/$sdist" -C "$work" --exclude='*/googletest' --exclude='*/cpptrace' "xgrammar-$version/cpp" \
  "xgrammar-$version/include" "xgrammar-$version/3rdparty" "xgrammar-$version/LICENSE" "xgrammar-$version/NOTICE"
# Another call may have been faster: its copy is the same.
mv -T "$work/xgrammar-$version" "$sources" 2>/dev/null || [ -d "$sources" ] || fail "could not write $sources"
echo "$sources"
