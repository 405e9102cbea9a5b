#!/bin/sh
# Builds and runs one fuzz target: run.sh NAME SECONDS [EXECUTIONS]. Ends after so many seconds, or executions if they are
# given. With 0 seconds, merges what earlier runs found into the committed corpus instead; "build" for SECONDS only builds.
set -eu
name=$1
seconds=$2
executions=${3:--1}
cd "$(dirname "$0")/../.."
folder=${WINNOW_FUZZ_DIR:-build/fuzz}
work=$folder/$name
compiler=
for candidate in clang++-19 clang++-18 clang++-17 clang++-16 clang++-15 clang++-14 clang++; do
  if command -v "$candidate" > /dev/null; then compiler=$candidate; break; fi
done
[ -n "$compiler" ] || { echo "run.sh: no clang++ found" >&2; exit 1; }
launcher=$(command -v ccache || true)

mkdir -p "$work/found" "$folder/objects" "$folder/proto"
packages="absl_status absl_statusor absl_strings absl_flat_hash_set absl_flat_hash_map absl_synchronization absl_time fmt spdlog libpcre2-8 libutf8proc libcrypto libssl libxxhash yaml-cpp protobuf grpc++"
# Messages are generated for a target that names their files in `Protos:` lines.
protos=$(sed -n 's|^// Protos: ||p' "tests/fuzz/${name}_fuzz.cc" | tr '\n' ' ')
generated=
for proto in $protos; do
  source=$folder/proto/${proto%.proto}.pb.cc
  [ "$source" -nt "proto/$proto" ] || protoc -I proto --cpp_out="$folder/proto" "$proto"
  generated="$generated $source"
done
# BOOST_DISABLE_ASSERTS: as CMakeLists.txt has it for what is served.
flags="-std=c++20 -DBOOST_DISABLE_ASSERTS -DWINNOW_VERSION=\"fuzz\" -O1 -gline-tables-only -ffunction-sections -fdata-sections -I. -I$folder/proto -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all -fsanitize-ignorelist=tests/fuzz/ignore.txt $(pkg-config --cflags $packages) -DFMT_SHARED"
# Only what the target says that it reaches, so that a run starts within a minute. Objects are shared among targets.
sources="tests/fuzz/${name}_fuzz.cc $(sed -n 's|^// Sources: ||p' "tests/fuzz/${name}_fuzz.cc" | tr '\n' ' ') $generated"
objects=
for source in $sources; do
  object=$folder/objects/$(echo "$source" | tr / _).o
  if [ ! -e "$object" ] || [ -n "$(find engine kernels server storage tests/fuzz "$folder/proto" -newer "$object" \( -name '*.h' -o -path "$source" \) | head -1)" ]; then
    echo "$source"
    # Before clang 17 a coroutine has no room for what -fsanitize=function puts before functions.
    more=
    if grep -q co_await "$source"; then more=-fno-sanitize=function; fi
    $launcher "$compiler" $flags $more -fsanitize=fuzzer-no-link -c "$source" -o "$object.$$"
    mv "$object.$$" "$object"
  fi
  objects="$objects $object"
done
# Functions that are not reached need no sources. Libraries beside the program come first (bundle.sh puts them there).
"$compiler" $flags -fsanitize=fuzzer -Wl,--gc-sections,-z,start-stop-gc,--as-needed,--disable-new-dtags '-Wl,-rpath,$ORIGIN/lib' $objects \
  $(pkg-config --libs $packages) -o "$work/fuzz"

if [ "$seconds" = build ]; then
  :
elif [ "$seconds" = 0 ]; then
  "$work/fuzz" -set_cover_merge=1 -use_counters=0 -max_len=1200 "tests/fuzz/corpus/$name" "$work/found"
else
  "$work/fuzz" -max_total_time="$seconds" -runs="$executions" -max_len=4096 -rss_limit_mb=2048 -timeout=5 \
    -artifact_prefix="$work/" -print_final_stats=1 "$work/found" "tests/fuzz/corpus/$name"
fi
