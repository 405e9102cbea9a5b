#!/bin/sh
# Builds and runs one fuzz target: run.sh NAME SECONDS [EXECUTIONS]. Ends after so many seconds, or executions if they are
# given. With 0 seconds, merges what earlier runs found into the committed corpus instead; "build" for SECONDS only builds.
set -eu
name=$1
seconds=$2
executions=${3:--1}
cd "$(dirname "$0")/../.."
work=${WINNOW_FUZZ_DIR:-build/fuzz}/$name
compiler=
for candidate in clang++-19 clang++-18 clang++-17 clang++-16 clang++; do
  if command -v "$candidate" > /dev/null; then compiler=$candidate; break; fi
done
[ -n "$compiler" ] || { echo "run.sh: no clang++ found" >&2; exit 1; }

# Targets share most of their sources.
launcher=$(command -v ccache || true)

mkdir -p "$work/found"
packages="absl_status absl_statusor absl_strings absl_flat_hash_set absl_flat_hash_map absl_synchronization absl_time fmt spdlog libpcre2-8 libutf8proc libcrypto libssl libxxhash"
# Beyond these, the packages that a target names in `Packages:` lines.
packages="$packages $(sed -n 's|^// Packages: ||p' "tests/fuzz/${name}_fuzz.cc" | tr '\n' ' ')"
# Messages are generated anew for a target that names their files in `Protos:` lines.
protos=$(sed -n 's|^// Protos: ||p' "tests/fuzz/${name}_fuzz.cc" | tr '\n' ' ')
generated=
if [ -n "$protos" ]; then
  packages="$packages protobuf grpc++"
  # One folder for all targets, so that ccache compiles a message once.
  generated_dir=${WINNOW_FUZZ_DIR:-build/fuzz}/proto
  mkdir -p "$generated_dir"
  protoc -I proto --cpp_out="$generated_dir" $protos
  for proto in $protos; do generated="$generated $generated_dir/${proto%.proto}.pb.cc"; done
fi
flags="-std=c++20 -DWINNOW_VERSION=\"fuzz\" -O1 -g -ffunction-sections -I. -I${WINNOW_FUZZ_DIR:-build/fuzz}/proto -DFMT_SHARED -DSPDLOG_COMPILED_LIB -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all $(pkg-config --cflags $packages)"
# Only what the target says that it reaches, so that a run starts within a minute.
sources="tests/fuzz/${name}_fuzz.cc $(sed -n 's|^// Sources: ||p' "tests/fuzz/${name}_fuzz.cc" | tr '\n' ' ') $generated"
objects=
for source in $sources; do
  object=$work/$(echo "$source" | tr / _).o
  if [ ! -e "$object" ] || [ -n "$(find engine kernels server storage tests/fuzz -newer "$object" \( -name '*.h' -o -path "$source" \) | head -1)" ]; then
    echo "$source"
    $launcher "$compiler" $flags -fsanitize=fuzzer-no-link -c "$source" -o "$object"
  fi
  objects="$objects $object"
done
# Functions that are not reached need no sources.
"$compiler" $flags -fsanitize=fuzzer -Wl,--gc-sections $objects $(pkg-config --libs $packages) -o "$work/fuzz"

if [ "$seconds" = build ]; then
  :
elif [ "$seconds" = 0 ]; then
  "$work/fuzz" -set_cover_merge=1 -use_counters=0 -max_len=1200 "tests/fuzz/corpus/$name" "$work/found"
else
  "$work/fuzz" -max_total_time="$seconds" -runs="$executions" -max_len=4096 -rss_limit_mb=2048 -timeout=5 \
    -artifact_prefix="$work/" -print_final_stats=1 "$work/found" "tests/fuzz/corpus/$name"
fi
