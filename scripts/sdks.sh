#!/usr/bin/env bash
# Fetches the packages openai and anthropic from PyPI (25 MB unpacked), for tests/agents. They are left in
# ${XDG_CACHE_HOME:-$HOME/.cache}/winnow; a second call finds them there. The last line of stdout is their Python's path.
# `scripts/sdks.sh --cached` fetches nothing. Needs Python 3.11 on x86-64.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/pypi.sh

requirements=tests/agents/sdk-requirements.txt
environment=$(environment_path sdks "$requirements")

if [ ! -e "$environment/complete" ]; then
  [ "${1:-}" != --cached ] || fail "$environment is not there"
  [ $# -eq 0 ] || fail "unknown argument $1"
  make_environment sdks "$requirements" "openai and anthropic"
fi
echo "$environment/bin/python"
