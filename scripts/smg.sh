#!/usr/bin/env bash
# Fetches SMG (Shepherd Model Gateway, Apache-2.0, 45 MB with what it needs) from PyPI, for the tests of several servers
# behind a router. It is left in ${XDG_CACHE_HOME:-$HOME/.cache}/winnow; a second call finds it there.
# The last line of stdout is the program's path. `scripts/smg.sh --cached` fetches nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/pypi.sh

requirements=tests/cluster/requirements.txt
environment=$(environment_path smg "$requirements")
smg=$environment/bin/smg

if [ -e "$environment/complete" ]; then
  echo "$smg"
  exit 0
fi
[ "${1:-}" != --cached ] || fail "$smg is not there"
[ $# -eq 0 ] || fail "unknown argument $1"
make_environment smg "$requirements" "SMG (about 45 MB)"
echo "$smg"
