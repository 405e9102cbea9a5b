#!/usr/bin/env bash
# What only a machine with a GPU can show, each by one command:
#
#   scripts/gpu.sh test [--gtest_filter=...]      every kernel and the backend against their references, fresh random inputs
#   scripts/gpu.sh sanitize [TOOL ...] [--gtest_filter=...]   the same under compute-sanitizer: memcheck, racecheck and synccheck, or those named
#   scripts/gpu.sh bench [--filter NAME] [...]    each kernel's time, and its share of the card's limit measured in the same run
#   scripts/gpu.sh steps                          the table of decode steps in kernels/README.md
#   scripts/gpu.sh timeline [FLAG ...]            where a layer of a decode step spends its time (kernels/README.md), with the program of
#                                                 scripts/build.sh timeline, or WINNOW_BIN
#   scripts/gpu.sh tokens [FLAG ...]              greedy tokens of `serve --device cuda FLAG...` against those of --device cpu
#   scripts/gpu.sh rounding                       the same of --device cpu --isa avx2 against --isa avx512: how far answers part where
#                                                 nothing but rounding differs, and no GPU has a hand in it
#   scripts/gpu.sh graphs [FLAG ...]              the same of `serve --device cuda FLAG...` with CUDA graphs against one without
#   scripts/gpu.sh resume [FLAG ...]              the same of `serve --device cuda FLAG...` with a store on disk, that computes,
#                                                 resumes lazily after a restart, and eagerly, against one without; and what was read
#   scripts/gpu.sh spill --host-bytes BYTES [FLAG ...]   the same with KV that is more than BYTES of the host hold, most of it on disk
#   scripts/gpu.sh fault                          an illegal instruction, and a write to nobody's memory, on the GPU under a server that
#                                                 answers: its stream ends with UNAVAILABLE, it exits with 70, its store is whole
#
# The first three need nvcc and GoogleTest and no more (build/cuda-alone); the others the whole program: `scripts/build.sh cuda`,
# or WINNOW_BIN. WINNOW_CUDA_BIN is a folder with winnow_cuda_test, winnow_cuda_bench and libwinnow_cuda_fault.so that were built elsewhere:
# nothing is built then. WINNOW_SEED is the seed of the document that the servers are asked about, a new one where it is not set.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() { sed -n '4,18s/^#   //p' "$0" >&2; exit 2; }
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

# ---- servers that are asked the same ----

launch=()
every_policy=(dense window oracle:k=2% quest:k=2% lsh:k=2% hata:k=2% spotlight:k=2% hashattention:k=2%
  spotlight:k=2%,p=0.95 lsh:k=2%,completion=on spotlight:k=2%,completion=on)

prepare_questions() {
  winnow=$(realpath "${WINNOW_BIN:-build/cuda/winnow}")
  work=$(mktemp -d)
  declare -gA servers=()
  trap '[ ${#servers[@]} = 0 ] || kill "${servers[@]}" 2>/dev/null || true; wait; rm -rf "$work"' EXIT
  seed=${WINNOW_SEED:-$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')}
  echo "a document of seed $seed"
  python3 scripts/make_document.py --seed "$seed" --bytes 90000 --out "$work"
  question=$(python3 -c 'import json, sys; print(json.loads(open(sys.argv[1]).readline())["question"])' "$work/questions.jsonl")
}

# start NAME FLAG...: a server, behind the command words in `launch`; "$work/NAME" says its port when it is ready, and "$work/NAME.log" what else it has to say.
start() {
  local name=$1
  shift
  "${launch[@]}" "$winnow" serve --model "${WINNOW_MODEL:-models/needle-5m}" --listen 127.0.0.1:0 --metrics 127.0.0.1:0 --http 127.0.0.1:0 --retrieval-from 0 \
    --port-file "$work/$name" "$@" >"$work/$name.log" 2>&1 &
  servers[$name]=$!
  until [ -s "$work/$name" ]; do
    kill -0 "${servers[$name]}" 2>/dev/null || { cat "$work/$name.log" >&2; exit 1; }
    sleep 0.1
  done
}

metrics() {
  local port
  port=$(grep -o 'metrics_port=[0-9]*' "$work/$1.log" | cut -d= -f2)
  python3 -c 'import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1]).read().decode())' "http://127.0.0.1:$port/metrics"
}

stop() {
  kill "${servers[$1]}"
  wait "${servers[$1]}" || { cat "$work/$1.log" >&2; exit 1; }
  unset "servers[$1]"
  rm "$work/$1"
}

# compare NAME NAME POLICY...
compare() {
  local left=$1 right=$2 policies=()
  shift 2
  for policy in "$@"; do policies+=(--policy "$policy"); done
  python3 scripts/compare_servers.py --winnow "$winnow" --server "127.0.0.1:$(cat "$work/$left")" --server "127.0.0.1:$(cat "$work/$right")" \
    --document "$work/document.txt" --bytes 8000 --bytes 30000 --bytes 90000 --question "$question" "${policies[@]}"
}

case $what in
  test)
    bin=$(cuda_bin)
    "$bin/winnow_cuda_test" "$@"
    ;;
  sanitize)
    bin=$(cuda_bin)
    sanitizer=$(command -v compute-sanitizer || echo "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer")
    tools=() filter=()
    for argument in "$@"; do
      case $argument in --*) filter+=("$argument") ;; *) tools+=("$argument") ;; esac
    done
    [ ${#tools[@]} -gt 0 ] || tools=(memcheck racecheck synccheck)
    for tool in "${tools[@]}"; do
      echo "==> $tool"
      # racecheck looks at shared memory only and is by far the slowest. Errors that the runtime returns are left to the tests,
      # some of which ask for more memory than there is.
      "$sanitizer" --tool "$tool" --error-exitcode 1 --report-api-errors no "$bin/winnow_cuda_test" --gtest_brief=1 "${filter[@]}"
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
  timeline)
    winnow=${WINNOW_BIN:-build/timeline/winnow}
    marks=$(mktemp)
    trap 'rm -f "$marks"' EXIT
    WINNOW_TIMELINE=$marks "$winnow" bench decode --like loadtest/shapes/llama-3.1-8b.json --device cuda --skip-dense --contexts 131072 \
      --policy lsh:k=2048,from=0 "$@"
    [ -s "$marks" ] || { echo "gpu.sh: the kernels of $winnow write nothing down: scripts/build.sh timeline makes some that do" >&2; exit 1; }
    python3 scripts/timeline.py "$marks"
    ;;
  tokens)
    prepare_questions
    start cpu --device cpu
    start cuda --device cuda "$@"
    compare cpu cuda "${every_policy[@]}"
    ;;
  rounding)
    prepare_questions
    start avx512 --device cpu --isa avx512  # refused where the processor has none: avx2 would be compared with itself
    start avx2 --device cpu --isa avx2
    compare avx512 avx2 "${every_policy[@]}"
    ;;
  graphs)
    prepare_questions
    start graphs --device cuda "$@"
    start plain --device cuda --cuda-graphs off "$@"
    compare graphs plain "${every_policy[@]}"
    ;;
  resume | spill)
    prepare_questions
    if [ "$what" = spill ]; then
      start memory --device cuda
      set -- --spill on "$@"
    else
      start memory --device cuda "$@"
    fi
    result=0
    for resume in auto lazy eager; do  # the first finds an empty store
      start store --device cuda "$@" --disk-bytes 8GiB --store-dir "$work/kv" --resume $resume
      echo "==> --resume $resume, $(du -sm "$work/kv" | cut -f1) MiB in the store"
      # Those first that read least of what is stored: whatever has been read stays.
      compare memory store window:suffix=100 lsh:k=2%,suffix=100 spotlight:k=2%,suffix=100 "${every_policy[@]:1}" dense || result=$?
      metrics store | grep -E '^winnow_(prompt_tokens|cached_tokens|kv_losses|kv_layer_blocks|kv_read_bytes|kv_tier_wait|store_(state|blocks|device))'
      stop store
    done
    exit $result
    ;;
  fault)
    library=$(realpath "$(cuda_bin)/libwinnow_cuda_fault.so")
    prepare_questions
    python3 -c 'import json, sys; print(json.dumps([{"role": "user", "content": open(sys.argv[1]).read()[:30000] + sys.argv[2]}]))' \
      "$work/document.txt" "$question" >"$work/chat.json"
    ask() {  # ask NAME TOKENS
      "$winnow" generate --server "127.0.0.1:$(cat "$work/$1")" --chat-file "$work/chat.json" --temperature 0 --ignore-eos \
        --policy lsh:k=2%,suffix=64 --max-tokens "$2"
    }
    start whole --device cuda
    ask whole 64 >"$work/expected"
    stop whole
    store=(--disk-bytes 4GiB --store-dir "$work/kv")
    mkfifo "$work/word" "$work/text"
    for word in trap address; do
      launch=(env WINNOW_CUDA_FAULT_FIFO="$work/word" LD_PRELOAD="$library")
      start broken --device cuda "${store[@]}"
      launch=()
      ask broken 10000 >"$work/text" 2>"$work/error" &
      asked=$!
      exec 3<"$work/text"
      head -c 20 <&3 >/dev/null  # it answers
      echo "$word" >"$work/word"
      cat <&3 >/dev/null
      exec 3<&-
      code=0; wait "$asked" || code=$?
      exited=0; wait "${servers[broken]}" || exited=$?
      unset "servers[broken]"
      rm "$work/broken"
      echo "==> $word: generate ended with $code ($(tr '\n' ' ' <"$work/error")), the server with $exited"
      grep -E 'cuda fault|CUDA' "$work/broken.log" | tail -3
      [ "$code" != 0 ]
      grep -q UNAVAILABLE "$work/error"
      [ "$exited" = 70 ]
      "$winnow" store verify --dir "$work/kv"
      start again --device cuda "${store[@]}"
      ask again 64 | cmp - "$work/expected"
      echo "started again: the same answer"
      stop again
    done
    ;;
  *)
    usage
    ;;
esac
