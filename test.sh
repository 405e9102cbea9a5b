#!/usr/bin/env bash
# Installs what is missing, builds, and runs every test: first under ASan and UBSan, then as served.
# WINNOW_TEST_SANITIZERS=0 leaves the first part out. Ends with the runner's totals.
set -euo pipefail
cd "$(dirname "$0")"

step() { printf '\n==> %s  [%d s]\n' "$1" "$SECONDS"; }

step "Dependencies"
scripts/install-deps.sh

step "Build (release)"
scripts/build.sh release

left_out=
step "Real model"
if [ -n "${WINNOW_REAL_MODEL:-}" ] || WINNOW_REAL_MODEL=$(scripts/real_model.sh | tail -1); then
  export WINNOW_REAL_MODEL
  echo "Tests on $WINNOW_REAL_MODEL run."
else
  left_out+="|real"
  echo "Tests on a real model (label real) are left out: there is no file, and scripts/real_model.sh got none."
fi

step "Router"
if scripts/smg.sh >/dev/null; then
  echo "Tests of several servers behind a router run."
else
  left_out+="|cluster"
  echo "Tests of several servers behind a router (label cluster) are left out: scripts/smg.sh got no smg."
fi

if [ "${WINNOW_TEST_SANITIZERS:-1}" != 0 ]; then
  step "Build (check: ASan + UBSan)"
  scripts/build.sh check
  step "Tests under ASan + UBSan"
  ctest --preset check
fi

step "Tests (release)"
ctest --preset release ${left_out:+--label-exclude "${left_out#|}"}
printf '\nAll of it took %d s.\n' "$SECONDS"
