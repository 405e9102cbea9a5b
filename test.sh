#!/usr/bin/env bash
# Installs what is missing, builds, and runs every test: first under ASan and UBSan, but for those with the label slow, then
# as served, but for unit tests of storage, engine and server.
# WINNOW_TEST_SANITIZERS=0 runs all of them as served instead. Ends with the runner's totals.
set -euo pipefail
cd "$(dirname "$0")"
export WINNOW_UNITY=${WINNOW_UNITY-ON}  # whole builds: scripts/build.sh

step() { printf '\n==> %s  [%d s]\n' "$1" "$SECONDS"; }

step "Dependencies"
scripts/install-deps.sh

left_out=
targets=()
if [ "${WINNOW_TEST_SANITIZERS:-1}" != 0 ]; then
  # Unit tests of storage, engine and server are built under sanitizers alone.
  left_out="|^unit$"
  targets=(winnow winnow_baselines winnow_make_store winnow_dying_device winnow_soak arithmetic_test bench_test kernels_test real_test)
fi
step "Build (release)"
scripts/build.sh release "${targets[@]}"

step "Real model"
if [ -n "${WINNOW_REAL_MODEL:-}" ] || WINNOW_REAL_MODEL=$(scripts/real_model.sh | tail -1); then
  export WINNOW_REAL_MODEL
  echo "Tests on $WINNOW_REAL_MODEL run."
else
  left_out+="|^real$"
  echo "Tests on a real model (label real) are left out: there is no file, and scripts/real_model.sh got none."
fi

step "Router"
if scripts/smg.sh >/dev/null; then
  echo "Tests of several servers behind a router run."
else
  left_out+="|^cluster$"
  echo "Tests of several servers behind a router (label cluster) are left out: scripts/smg.sh got no smg."
fi

if [ "${WINNOW_TEST_SANITIZERS:-1}" != 0 ]; then
  step "Build (check: ASan + UBSan)"
  scripts/build.sh check
  step "Tests under ASan + UBSan"
  ctest --preset check
fi

step "Tests (release)"
# A test program that was left out above is one test, which says that it was not built.
ctest --preset release ${left_out:+--label-exclude "${left_out#|}"} \
  ${targets:+--exclude-regex '^(storage|engine|server)_test_NOT_BUILT$'}
printf '\nAll of it took %d s.\n' "$SECONDS"
