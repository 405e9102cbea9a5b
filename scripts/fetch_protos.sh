#!/usr/bin/env bash
# Fetches the protos of vllm.grpc.engine.VllmEngine out of the PyPI package smg-grpc-proto (Apache-2.0, 110 KB), which the
# gateway SMG publishes. They are left in ${XDG_CACHE_HOME:-$HOME/.cache}/winnow; a second call finds them there.
# The last line of stdout is the folder. `scripts/fetch_protos.sh --cached` fetches nothing.
set -euo pipefail

version=0.4.28
wheel=smg_grpc_proto-$version-py3-none-any.whl
wheel_sha256=970dec0a8c0e78b42758c7690cc7b8bbf0416f680fdad448a4f5c9b8c3e68afb
members=(vllm_engine.proto common.proto)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/winnow
protos=$cache/smg-grpc-proto-$version

fail() { echo "fetch_protos.sh: $*" >&2; exit 1; }

# The folder is put in place whole, after its checksum was right.
if [ -d "$protos" ]; then
  echo "$protos"
  exit 0
fi
[ "${1:-}" != --cached ] || fail "$protos is not there"
[ $# -eq 0 ] || fail "unknown argument $1"

mkdir -p "$cache"
work=$(mktemp -d "$cache/fetch.XXXXXX")
trap 'rm -rf "$work"' EXIT

# pip is used as it is, or else from an environment of its own; Debian's python3 alone has neither pip nor ensurepip.
pip=(python3 -m pip)
if ! "${pip[@]}" --version >/dev/null 2>&1; then
  python3 -m venv "$work/venv" >"$work/venv.log" 2>&1 ||
    fail "python3 has no pip, and makes no environment with it: install python3-pip or python3-venv"
  pip=("$work/venv/bin/python" -m pip)
fi

# Configuring waits for this, so it gives up soon where there is no network.
echo "smg-grpc-proto==$version --hash=sha256:$wheel_sha256" >"$work/requirements.txt"
"${pip[@]}" download --quiet --disable-pip-version-check --retries 1 --timeout 15 --no-deps --only-binary :all: \
  --require-hashes --requirement "$work/requirements.txt" --dest "$work" >"$work/pip.log" 2>&1 ||
  { tail -1 "$work/pip.log" >&2; fail "could not fetch smg-grpc-proto $version: is there a network, and a package index?"; }

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
