#!/usr/bin/env bash
# Measures which lines the unit tests reach: scripts/coverage.sh [TEST_REGEX].
# Builds the test programs in TARGETS (storage_test, server_test and engine_test) in build/coverage, runs those of their tests whose names match
# (all, if absent; ctest's names, such as "^storage\."), and prints line coverage of the groups in
# scripts/coverage_table.py by group and by file. LABEL=... chooses another label of tests than `unit`, JOBS=... other than
# two at a time.
# Needs what scripts/install-deps.sh installs: gcov comes with build-essential's GCC.
set -euo pipefail
cd "$(dirname "$0")/.."
build=build/coverage
jobs=${JOBS:-2}
mkdir -p $build

# Only folders with measured sources are instrumented, without optimization because lines would be merged. All others are
# compiled as in the release preset: the kernels stay fast, and ccache may have them already.
launcher=$PWD/$build/instrument
cat > "$launcher" <<'LAUNCHER'
#!/bin/sh
cache=$(command -v ccache || true)
case " $* " in
  *_test.dir/* | *_worker.dir/*) ;;
  *winnow_storage.dir/* | *winnow_server.dir/* | *winnow_schedule.dir/* | *winnow_retrieval.dir/* | *winnow_text.dir/* | \
  *winnow_jinja.dir/* | *winnow_model.dir/* | *winnow_grammar.dir/* | *winnow_base.dir/*)
    set -- "$@" -O0 --coverage -fprofile-update=atomic ;;
esac
exec $cache "$@"
LAUNCHER
chmod +x "$launcher"

cmake -S . -B $build -G Ninja -DCMAKE_BUILD_TYPE=Release -DCCACHE="$launcher" -DCMAKE_EXE_LINKER_FLAGS=--coverage \
  -DWINNOW_BASELINES=OFF -DWINNOW_UNITY=ON > $build/configure.log || { cat $build/configure.log; exit 1; }
# shellcheck disable=SC2086
ninja -C $build -j "$jobs" ${TARGETS:-storage_test server_test engine_test} > $build/build.log ||
  { tail -40 $build/build.log; exit 1; }

find $build -name '*.gcda' -delete
failed=0
ctest --test-dir $build -j "$jobs" -L "^${LABEL:-unit}\$" -R "${1:-.}" --no-tests=error > $build/tests.log 2>&1 || failed=1
# Failed tests are shown beside the numbers, since lines that they did not reach are missing there.
tail -n 30 $build/tests.log | grep -E '^[0-9]+% tests passed|^Total Test time|\((Failed|Timeout|Subprocess aborted|SEGFAULT)\)' || true
python3 scripts/coverage_table.py $build
exit $failed
