#!/usr/bin/env bash
# Sets everything up in a private .venv in the project's folder; does nothing the second time, until sources change.
# demo.sh and test.sh source this file: afterwards $root is the project's folder and $venv its environment.
#
# Environment:
#   PYTHON               the interpreter to build .venv with (default: the first of python3, python3.14 ... python3.10)
#   OFFLOAD_TORCH_INDEX  address of a package index to take torch from, such as that of PyTorch's CPU-only builds, which
#                        are much smaller than the default ones with CUDA
#   OFFLOAD_REQUIRE_NATIVE=1  fail rather than build without io_uring
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv

say() { printf 'setup: %s\n' "$*" >&2; }
fail() { say "error: $*"; exit 1; }
has() { command -v "$1" >/dev/null 2>&1; }

# The interpreter: the one asked for, or the first that is new enough.
find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python3.10}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  fail "Python 3.10 or later is needed, and ${PYTHON:-python3} is not. Install one, or name it: PYTHON=/path/to/python3"
}

has_liburing() {
  [[ -n ${LIBURING_ROOT:-} || -e $root/.deps/liburing ]] || { has pkg-config && pkg-config --exists liburing; }
}

# The Debian packages of what is missing here. What is there already, from wherever, is taken as it is.
missing_packages() {
  "$python" -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
  "$python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
    echo python3-dev
  { has c++ && has make; } || echo build-essential
  has cmake || echo cmake
  has ninja || echo ninja-build
  has pkg-config || echo pkg-config
  has_liburing || echo liburing-dev
}

# Install them if that can be done without a question, and say what follows if not.
install_packages() {
  local missing as_root=()
  mapfile -t missing < <(missing_packages)
  ((${#missing[@]})) || return 0
  if has apt-get; then
    if ((EUID != 0)); then as_root=(sudo -n); fi
    if ((EUID == 0)) || { has sudo && sudo -n true 2>/dev/null; }; then
      say "installing ${missing[*]}"
      "${as_root[@]}" apt-get update -qq >/dev/null 2>&1 || true # without a network, what is cached may do
      "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null 2>"$log" && return 0
      say "apt-get could not: $(tail -n 1 "$log")"
    fi
  fi
  has c++ || fail "a C++ compiler is needed. As root: apt install ${missing[*]}"
  [[ " ${missing[*]} " != *" python3-dev "* ]] || fail "Python.h is needed. As root: apt install ${missing[*]}"
  [[ " ${missing[*]} " != *" python3-venv "* ]] || fail "the module venv is needed. As root: apt install ${missing[*]}"
  has_liburing || say "going on without liburing-dev: I/O by threads instead of io_uring"
}

pip() { "$venv/bin/python" -m pip --disable-pip-version-check -qq "$@"; }

# Bytecode of all libraries takes a minute to make, and most of it is never run: what is imported makes its own, once.
unset PYTHONDONTWRITEBYTECODE
pip_install() { pip install --no-compile "$@"; }

oldest_torch=$(sed -n 's/^ *"torch>=\(.*\)",$/\1/p' "$root/pyproject.toml")

torch_version() { # of the torch that an interpreter sees, if it is new enough
  "$1" - "$oldest_torch" <<'PY' 2>/dev/null
import re
import sys
from importlib.metadata import version
found, oldest = version("torch"), sys.argv[1]
assert tuple(map(int, re.findall(r"\d+", found)[:2])) >= tuple(map(int, oldest.split(".")))
print(found)
PY
}

make_venv() {
  if pip --version >/dev/null 2>&1; then return; fi
  local see=()
  if torch_version "$python" >/dev/null; then see=(--system-site-packages); fi
  say "making .venv with $("$python" --version)"
  "$python" -m venv --clear "${see[@]}" "$venv"
}

install_torch() {
  if torch_version "$venv/bin/python" >/dev/null; then return; fi
  local index=()
  if [[ -n ${OFFLOAD_TORCH_INDEX:-} ]]; then index=(--index-url "$OFFLOAD_TORCH_INDEX"); fi
  say "installing torch"
  pip_install "${index[@]}" --constraint "$root/scripts/constraints.txt" torch ||
    fail "pip found no $(grep '^torch' "$root/scripts/constraints.txt") for $("$python" --version) on this machine. Set" \
      "OFFLOAD_TORCH_INDEX to an index that has it, or install any torch >= $oldest_torch for $python, and remove .venv"
}

# The GPU kernels' compiler for the tests. With a torch for CUDA comes one; else a release whose libraries do not find each
# other by themselves, like those of some CUDA installations.
compiler_version() {
  "$venv/bin/python" - <<'PY'
from importlib.metadata import requires
if not any("cuda" in line or "nvidia" in line for line in requires("torch") or ()):
    print("nvidia-cuda-nvrtc==13.0.88")
PY
}

# The backend of pyproject.toml, and what it wants besides: CMake and Ninja, where those here are too old.
install_build_tools() {
  pip_install scikit-build-core pybind11 && (
    cd "$root"
    "$venv/bin/python" -c '
from scikit_build_core.build import get_requires_for_build_editable as needed
print(*needed(), sep="\n")
' | xargs --no-run-if-empty "$venv/bin/python" -m pip --disable-pip-version-check -qq install --no-compile
  )
}

# What the project depends on, with all extras.
libraries() {
  "$venv/bin/python" - "$root/pyproject.toml" <<'PY'
import sys
from pathlib import Path
try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib
project = tomllib.loads(Path(sys.argv[1]).read_text())["project"]
found = sum(project["optional-dependencies"].values(), project["dependencies"])
print(*(each for each in found if not each.startswith(project["name"])), sep="\n")
PY
}

# Compile while libraries are installed. The tools stay in .venv: what they compile serves every build. The objects are all that
# is wanted; should one not compile, the installation says why. Until then no second set-up begins: this holds the lock, too.
compile_meanwhile() {
  install_build_tools || fail "the tools of the build could not be installed; the reason is above"
  pip wheel --no-deps --no-build-isolation --wheel-dir "$venv/compiled" "$root" >/dev/null 2>&1 &
  compiling=$!
}

# No dependency may bring another torch than the one that is there.
install_libraries() {
  say "compiling, and installing libraries"
  { printf 'torch==%s\n' "$(torch_version "$venv/bin/python")" && compiler_version; } >"$venv/constraints.txt"
  libraries | pip_install --constraint "$venv/constraints.txt" --requirement /dev/stdin ||
    fail "libraries could not be installed; the reason is above"
}

install_project() {
  wait "$compiling" || true
  rm -rf "$venv/compiled"
  say "installing the project"
  pip_install --no-build-isolation --check-build-dependencies --constraint "$venv/constraints.txt" \
    --editable "$root[dev]" || fail "the project could not be built; the reason is above"
}

# What the installation was made from. Editable Python sources count by name only.
fingerprint() {
  cd "$root"
  "$python" --version
  echo "${OFFLOAD_REQUIRE_NATIVE:-} ${LIBURING_ROOT:-} $(has_liburing && echo liburing)"
  cat offload/version.py
  find offload swapper aio_ext -name '*.py' | sort
  find pyproject.toml CMakeLists.txt scripts/setup.sh scripts/constraints.txt offload aio_ext -type f \
    \( -name '*.toml' -o -name '*.txt' -o -name '*.sh' -o -name '*.cpp' -o -name '*.h' \) -print0 | sort -z | xargs -0 cat
}

main() {
  local python log stamp compiling
  python=$(find_python) || exit 1
  stamp=$(fingerprint | sha256sum)
  if [[ -x $venv/bin/offload && $(cat "$venv/stamp" 2>/dev/null) == "$stamp" ]]; then return; fi
  exec 9<"$root/pyproject.toml" # one set-up at a time
  flock 9
  log=$(mktemp)
  install_packages
  make_venv
  compile_meanwhile
  install_torch
  install_libraries
  install_project
  fingerprint | sha256sum >"$venv/stamp"
  rm -f "$log"
  exec 9<&-
  say "ready"
}

main
