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

if [ "${WINNOW_TEST_SANITIZERS:-1}" != 0 ]; then
  step "Build (check: ASan + UBSan)"
  scripts/build.sh check
  step "Tests under ASan + UBSan"
  ctest --preset check --label-exclude slow
fi

step "Tests (release)"
ctest --preset release
printf '\nAll of it took %d s.\n' "$SECONDS"
