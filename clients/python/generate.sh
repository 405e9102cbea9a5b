#!/usr/bin/env bash
# Makes the messages of winnow_client from proto/ again: generate.sh [DIR]. Needs protoc; Debian 12's (3.21) is what is
# committed, which every protobuf from 3.20 on can load.
set -euo pipefail
cd "$(dirname "$0")"
out=${1:-winnow_client}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# By the path that every generator gives it: one process may load the file twice, but not under two names.
protoc -I ../../proto --python_out="$work" --pyi_out="$work" winnow/v1/inference.proto winnow/v1/prefix.proto winnow/v1/admin.proto
for kind in py pyi; do
  for name in inference prefix admin; do
    sed 's/^from winnow\.v1 import inference_pb2 as/from . import winnow_inference_pb2 as/' "$work/winnow/v1/${name}_pb2.$kind" \
      >"$out/winnow_${name}_pb2.$kind"
  done
done
protoc -I proto --python_out="$out" --pyi_out="$out" winnow_errors.proto
