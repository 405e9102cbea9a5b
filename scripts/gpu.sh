#!/usr/bin/env bash
# What only a machine with a GPU can show, each by one command:
#
#   scripts/gpu.sh test [--gtest_filter=...]      every kernel and the backend against their references, fresh random inputs
#   scripts/gpu.sh sanitize [TOOL ...]            the same under compute-sanitizer: memcheck, racecheck and synccheck, or those named
#   scripts/gpu.sh bench [--filter NAME] [...]    each kernel's time, and its share of the card's limit measured in the same run
#   scripts/gpu.sh steps                          the table of decode steps in kernels/README.md
#   scripts/gpu.sh tokens [FLAG ...]              greedy tokens of `serve --device cuda FLAG...` against those of --device cpu
#
# The first three need nvcc and GoogleTest and no more (build/cuda-alone); the others the whole program: `scripts/build.sh cuda`,
# or WINNOW_BIN. WINNOW_CUDA_BIN is a folder with winnow_cuda_test and winnow_cuda_bench that were built elsewhere: nothing is built then.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() { sed -n '4,8s/^#   //p' "$0" >&2; exit 2; }
[ $# -gt 0 ] || usage
what=$1
shift

card=$(nvidia-smi --query-gpu=name,driver_version,compute_cap --format=csv,noheader 2>&1) ||
  { echo "gpu.sh: no GPU here that a driver knows of: ${card:-nvidia-smi failed}" >&2; exit 1; }
echo "$card, $(date +%F)"

cuda_bin() {
  if [ -n "${WINNOW_CUDA_BIN:-}" ]; then
    echo "$WINNOW_CUDA_BIN"
    return
  fi
  # For the card that is here: what is compiled for others is not run. Of 9.0 all that it has (wgmma.cuh).
  local arch
  arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | sort -u | tr -d . | sed 's/^90$/90a/' | paste -sd ';')
  cmake -S kernels/cuda -B build/cuda-alone "-DCMAKE_CUDA_ARCHITECTURES=$arch" >&2
  cmake --build build/cuda-alone -j "$(nproc)" >&2
  echo build/cuda-alone
}

case $what in
  test)
    bin=$(cuda_bin)
    "$bin/winnow_cuda_test" "$@"
    ;;
  sanitize)
    bin=$(cuda_bin)
    sanitizer=$(command -v compute-sanitizer || echo "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer")
    [ $# -gt 0 ] || set -- memcheck racecheck synccheck
    for tool in "$@"; do
      echo "==> $tool"
      # racecheck looks at shared memory only and is by far the slowest.
      "$sanitizer" --tool "$tool" --error-exitcode 1 "$bin/winnow_cuda_test" --gtest_brief=1
    done
    ;;
  bench)
    bin=$(cuda_bin)
    "$bin/winnow_cuda_bench" "$@"
    ;;
  steps)
    winnow=${WINNOW_BIN:-build/cuda/winnow}
    shape=loadtest/shapes/llama-3.1-8b.json
    "$winnow" bench decode --like $shape --device cuda --contexts 8192,32768,131072 \
      --policy dense --policy window --policy lsh:k=16,from=0 --policy lsh:k=2048,from=0 "$@"
    for batch in 8 24; do
      "$winnow" bench decode --like $shape --device cuda --contexts 32768 --batch $batch --policy dense --policy lsh:k=512,from=0 "$@"
    done
    ;;
  tokens)
    winnow=$(realpath "${WINNOW_BIN:-build/cuda/winnow}")
    work=$(mktemp -d)
    servers=()
    trap 'kill "${servers[@]}" 2>/dev/null; wait; rm -rf "$work"' EXIT
    for device in cpu cuda; do
      flags=()
      [ $device = cpu ] || flags=("$@")
      "$winnow" serve --model models/needle-5m --device $device --listen 127.0.0.1:0 --metrics off --retrieval-from 0 \
        --port-file "$work/$device" "${flags[@]}" >"$work/$device.log" 2>&1 &
      servers+=($!)
    done
    for at in 0 1; do
      device=$([ $at = 0 ] && echo cpu || echo cuda)
      until [ -s "$work/$device" ]; do
        kill -0 "${servers[$at]}" 2>/dev/null || { cat "$work/$device.log" >&2; exit 1; }
        sleep 0.1
      done
    done
    seed=$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')
    echo "a document of seed $seed"
    python3 scripts/make_document.py --seed "$seed" --bytes 90000 --out "$work"
    question=$(python3 -c 'import json, sys; print(json.loads(open(sys.argv[1]).readline())["question"])' "$work/questions.jsonl")
    policies=()
    for policy in dense window oracle:k=2% quest:k=2% lsh:k=2% hata:k=2% spotlight:k=2% hashattention:k=2% \
      spotlight:k=2%,p=0.95 lsh:k=2%,completion=on spotlight:k=2%,completion=on; do
      policies+=(--policy "$policy")
    done
    python3 scripts/compare_servers.py --winnow "$winnow" --server "127.0.0.1:$(cat "$work/cpu")" --server "127.0.0.1:$(cat "$work/cuda")" \
      --document "$work/document.txt" --bytes 8000 --bytes 30000 --bytes 90000 --question "$question" "${policies[@]}"
    ;;
  *)
    usage
    ;;
esac
