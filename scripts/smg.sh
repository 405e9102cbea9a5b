#!/usr/bin/env bash
# Fetches SMG (Shepherd Model Gateway, Apache-2.0, 45 MB with what it needs) from PyPI, for the tests of several servers
# behind a router. It is left in ${XDG_CACHE_HOME:-$HOME/.cache}/winnow; a second call finds it there.
# The last line of stdout is the program's path. `scripts/smg.sh --cached` fetches nothing.
set -euo pipefail
cd "$(dirname "$0")/.."

requirements=tests/cluster/requirements.txt
cache=${XDG_CACHE_HOME:-$HOME/.cache}/winnow
environment=$cache/smg-$(sha256sum "$requirements" | cut -c1-12)
smg=$environment/bin/smg

fail() { echo "smg.sh: $*" >&2; exit 1; }

if [ -e "$environment/complete" ]; then
  echo "$smg"
  exit 0
fi
[ "${1:-}" != --cached ] || fail "$smg is not there"
[ $# -eq 0 ] || fail "unknown argument $1"

# It cannot be moved into place afterwards: an environment's programs name its folder.
mkdir -p "$cache"
exec 9>"$environment.lock"
flock 9
if [ ! -e "$environment/complete" ]; then
  echo "==> Fetching SMG from PyPI (about 45 MB)" >&2
  log=$(mktemp)
  trap 'rm -f "$log"' EXIT
  rm -rf "$environment"
  python3 -m venv "$environment" >"$log" 2>&1 || { tail -3 "$log" >&2; fail "python3 makes no environment: install python3-venv"; }
  "$environment/bin/python" -m pip install --quiet --disable-pip-version-check --retries 1 --timeout 30 --no-deps \
    --only-binary :all: --require-hashes --requirement "$requirements" >"$log" 2>&1 ||
    { tail -3 "$log" >&2; fail "could not fetch SMG: is there a network, and a package index?"; }
  touch "$environment/complete"
fi
echo "$smg"
