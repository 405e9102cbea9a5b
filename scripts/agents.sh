#!/usr/bin/env bash
# Fetches Codex 0.163.0 and Claude Code 2.1.332 from PyPI (320 MB, 800 MB unpacked), for tests/agents. They are left in
# ${XDG_CACHE_HOME:-$HOME/.cache}/winnow; a second call finds them there. The last two lines of stdout are the programs'
# paths. `scripts/agents.sh --cached` fetches nothing. Claude Code is not free software: its terms are those of its makers.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/pypi.sh

requirements=tests/agents/requirements.txt
environment=$(environment_path agents "$requirements")

if [ ! -e "$environment/complete" ]; then
  [ "${1:-}" != --cached ] || fail "$environment is not there"
  [ $# -eq 0 ] || fail "unknown argument $1"
  make_environment agents "$requirements" "Codex and Claude Code (about 320 MB)"
fi
packages=$(echo "$environment"/lib/python3*/site-packages)
ls "$packages/codex_cli_bin/bin/codex"
ls "$packages/claude_agent_sdk/_bundled/claude"
