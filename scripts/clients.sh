#!/usr/bin/env bash
# Fetches clients of the HTTP port from PyPI, for tests/agents:
#
#   scripts/clients.sh frameworks    langchain-openai, instructor, pydantic-ai-slim and llm (190 MB unpacked)
#   scripts/clients.sh lm-eval       lm-eval (760 MB unpacked)
#
# They are left in ${XDG_CACHE_HOME:-$HOME/.cache}/winnow; a second call finds them there. The last line of stdout is their
# Python's path. With --cached behind the name nothing is fetched. Needs Python 3.11 on x86-64.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/pypi.sh

name=${1:-}
requirements=tests/agents/$name-requirements.txt
case $name in
  frameworks) what="langchain-openai, instructor, pydantic-ai-slim and llm" ;;
  lm-eval) what="lm-eval" ;;
  *) fail "name frameworks or lm-eval" ;;
esac
environment=$(environment_path "clients-$name" "$requirements")

if [ ! -e "$environment/complete" ]; then
  [ "${2:-}" != --cached ] || fail "$environment is not there"
  [ $# -eq 1 ] || fail "unknown argument $2"
  make_environment "clients-$name" "$requirements" "$what"
fi
echo "$environment/bin/python"
