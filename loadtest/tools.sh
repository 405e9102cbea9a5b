#!/usr/bin/env bash
# Fetches a load test tool from PyPI, guidellm 0.8.1 or aiperf 0.13.0, in the versions and with the checksums of tools-NAME.txt:
#
#   loadtest/tools.sh guidellm|aiperf
#
# It is left in ${XDG_CACHE_HOME:-$HOME/.cache}/winnow; a second call finds it there. The last line of stdout is the program's path.
# guidellm brings PyTorch (4 GB with its libraries for GPUs, which are not used), aiperf 1.2 GB. Needs Python 3.11 on x86-64.
set -euo pipefail
cd "$(dirname "$0")"
source ../scripts/pypi.sh

[ $# -eq 1 ] && [ -e "tools-$1.txt" ] || fail "name guidellm or aiperf"
make_environment "$1" "tools-$1.txt" "$1"
echo "$(environment_path "$1" "tools-$1.txt")/bin/$1"
