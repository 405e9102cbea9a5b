#!/usr/bin/env bash
# Fetches a load test tool from PyPI, guidellm 0.8.1 or aiperf 0.13.0, in the versions and with the checksums of tools-NAME.txt:
#
#   loadtest/tools.sh guidellm|aiperf
#
# It is left in ${XDG_CACHE_HOME:-$HOME/.cache}/winnow; a second call finds it there. The last line of stdout is the program's path.
# guidellm brings PyTorch (4 GB with its libraries for GPUs, which are not used), aiperf 1.2 GB. Needs Python 3.11 on x86-64.
set -euo pipefail
cd "$(dirname "$0")"

fail() { echo "tools.sh: $*" >&2; exit 1; }
[ $# -eq 1 ] && [ -e "tools-$1.txt" ] || fail "name guidellm or aiperf"
requirements=tools-$1.txt
cache=${XDG_CACHE_HOME:-$HOME/.cache}/winnow
environment=$cache/$1-$(sha256sum "$requirements" | cut -c1-12)

mkdir -p "$cache"
exec 9>"$environment.lock"
flock 9
if [ ! -e "$environment/complete" ]; then
  echo "==> Fetching $1 from PyPI" >&2
  log=$(mktemp)
  trap 'rm -f "$log"' EXIT
  rm -rf "$environment"
  python3 -m venv "$environment" >"$log" 2>&1 || { tail -3 "$log" >&2; fail "python3 makes no environment: install python3-venv"; }
  "$environment/bin/python" -m pip install --quiet --disable-pip-version-check --retries 1 --timeout 60 --no-deps \
    --only-binary :all: --require-hashes --requirement "$requirements" >"$log" 2>&1 ||
    { tail -3 "$log" >&2; fail "could not fetch $1: is there a network, and a package index?"; }
  touch "$environment/complete"
fi
echo "$environment/bin/$1"
