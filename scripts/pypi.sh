# Sourced by scripts that take something out of a package on PyPI and leave it in the cache, whole, after its checksum was
# right: real_model.sh, fetch_protos.sh, fetch_xgrammar.sh; and by those that make an environment: smg.sh, loadtest/tools.sh.
#
#   $cache                    the folder, of all of them
#   fail MESSAGE              ends the script in its name
#   make_work_folder          $work, in the cache, so that what is made there can be moved into place; gone at the end
#   environment_path NAME REQUIREMENTS              prints where make_environment puts it
#   make_environment NAME REQUIREMENTS WHAT         a virtual environment of the requirements, with hashes; does nothing where it is whole
#   download PACKAGE VERSION FILE SHA256 PIP_OPTION...    leaves $work/FILE, or fails
# shellcheck shell=bash
cache=${XDG_CACHE_HOME:-$HOME/.cache}/winnow

fail() { echo "$(basename "$0"): $*" >&2; exit 1; }

make_work_folder() {
  mkdir -p "$cache"
  work=$(mktemp -d "$cache/fetch.XXXXXX")
  trap 'rm -rf "$work"' EXIT
}

download() {
  local package=$1 version=$2 file=$3 sha256=$4
  shift 4
  # pip is used as it is, or else from an environment of its own; Debian's python3 alone has neither pip nor ensurepip.
  local pip=(python3 -m pip)
  if ! "${pip[@]}" --version >/dev/null 2>&1; then
    python3 -m venv "$work/venv" >"$work/venv.log" 2>&1 ||
      fail "python3 has no pip, and makes no environment with it: install python3-pip or python3-venv"
    pip=("$work/venv/bin/python" -m pip)
  fi
  # Builds wait for this, so it gives up soon where there is no network.
  "${pip[@]}" download --quiet --disable-pip-version-check --retries 1 --timeout 15 --no-deps "$@" --dest "$work" \
    "$package==$version" >"$work/pip.log" 2>&1 ||
    { tail -3 "$work/pip.log" >&2; fail "could not fetch $package $version: is there a network, and a package index?"; }
  echo "$sha256  $work/$file" | sha256sum --check --status ||
    fail "$file is not the file that was expected (SHA-256 $(sha256sum "$work/$file" | cut -d' ' -f1))"
}

environment_path() { echo "$cache/$1-$(sha256sum "$2" | cut -c1-12)"; }

# An environment cannot be moved into place afterwards, because its programs name its folder: the file `complete` says that it is whole.
make_environment() {
  local requirements=$2 what=$3 environment log
  environment=$(environment_path "$1" "$2")
  mkdir -p "$cache"
  exec 9>"$environment.lock"
  flock 9
  [ ! -e "$environment/complete" ] || return 0
  echo "==> Fetching $what from PyPI" >&2
  log=$(mktemp)
  rm -rf "$environment"
  python3 -m venv "$environment" >"$log" 2>&1 || { tail -3 "$log" >&2; rm "$log"; fail "python3 makes no environment: install python3-venv"; }
  "$environment/bin/python" -m pip install --quiet --disable-pip-version-check --retries 1 --timeout 60 --no-deps \
    --only-binary :all: --require-hashes --requirement "$requirements" >"$log" 2>&1 ||
    { tail -3 "$log" >&2; rm "$log"; fail "could not fetch $what: is there a network, and a package index?"; }
  rm "$log"
  touch "$environment/complete"
}
