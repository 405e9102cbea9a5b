#!/usr/bin/env bash
# Fetches the protos of vllm.grpc.engine.VllmEngine out of the PyPI package smg-grpc-proto (Apache-2.0, 110 KB), which the
# gateway SMG publishes. They are left in ${XDG_CACHE_HOME:-$HOME/.cache}/winnow; a second call finds them there.
# The last line of stdout is the folder. `scripts/fetch_protos.sh --cached` fetches nothing.
set -euo pipefail
source "$(dirname "$0")/pypi.sh"

version=0.4.28
wheel=smg_grpc_proto-$version-py3-none-any.whl
wheel_sha256=970dec0a8c0e78b42758c7690cc7b8bbf0416f680fdad448a4f5c9b8c3e68afb
members=(vllm_engine.proto common.proto)
protos=$cache/smg-grpc-proto-$version

# The folder is put in place whole, after its checksum was right.
if [ -d "$protos" ]; then
  echo "$protos"
  exit 0
fi
[ "${1:-}" != --cached ] || fail "$protos is not there"
[ $# -eq 0 ] || fail "unknown argument $1"

make_work_folder
download smg-grpc-proto $version $wheel $wheel_sha256 --only-binary :all:

mkdir "$work/protos"
python3 - "$work/$wheel" "$work/protos" "${members[@]}" <<'PYTHON'
import pathlib, sys, zipfile
wheel, out, *members = sys.argv[1:]
with zipfile.ZipFile(wheel) as archive:
    for member in members:
        pathlib.Path(out, member).write_bytes(archive.read("smg_grpc_proto/proto/" + member))
PYTHON
# Another build may have been quicker.
mv -T "$work/protos" "$protos" 2>/dev/null || [ -d "$protos" ] || fail "cannot put $protos in place"
echo "$protos"
