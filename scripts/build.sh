#!/usr/bin/env bash
# Configures and builds one preset: scripts/build.sh [release|check|tsan|cuda|timeline] [target ...]
# Prints one line when there is nothing to do. JOBS sets the number of compile jobs (default: processors, at most
# one per 3 GiB of memory, because a file that includes gRPC takes about that much under sanitizers).
# WINNOW_UNITY=ON compiles files in groups where the preset was not configured before: half the time for a whole build.
set -euo pipefail
cd "$(dirname "$0")/.."

preset=${1:-release}
[ $# -gt 0 ] && shift
memory_gib=$(awk '/MemTotal/ {print int($2 / 1048576)}' /proc/meminfo)
jobs=${JOBS:-$(nproc)}
most=$((memory_gib / 3 > 0 ? memory_gib / 3 : 1))
[ "$jobs" -gt "$most" ] && jobs=$most

log=$(mktemp)
trap 'rm -f "$log"' EXIT
configure=(--preset "$preset")
if [ -n "${WINNOW_UNITY:-}" ] && [ ! -f "build/$preset/CMakeCache.txt" ]; then
  configure+=("-DWINNOW_UNITY=$WINNOW_UNITY")
fi
cmake "${configure[@]}" >"$log" 2>&1 || { cat "$log" >&2; exit 1; }
if [ -t 1 ]; then
  cmake --build "build/$preset" -j "$jobs" ${@:+--target "$@"}
else
  # Without a terminal ninja prints a line for each of hundreds of steps: keep every 20th, and all that is not a step.
  cmake --build "build/$preset" -j "$jobs" ${@:+--target "$@"} |
    awk '/^\[[0-9]+\/[0-9]+\]/ { split(substr($1, 2), a, "[/]]"); if (a[1] % 20 == 0 || a[1] == a[2]) print; fflush(); next } { print; fflush() }'
fi
