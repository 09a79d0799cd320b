#!/usr/bin/env bash
# Build the I/O core with sanitizers, and run over it its own test program, its Python suite and, under the address
# sanitizer, the fuzzer of files. The kernels are those of the environment: compilers need many minutes to instrument
# them, and what they are given has been checked by then.
#
#   scripts/sanitize.sh [address] [thread] [--inputs N] [-- PYTEST ARGUMENTS]
#                                                  default: both, 2,000 inputs of the fuzzer, and all of tests/aio_ext
#
# PYTHON names the interpreter (default: python3 of the environment), with pybind11, pytest and torch. Exit status 0: all
# clean.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
kinds=()
inputs=2000
while [[ $# -gt 0 && $1 != -- ]]; do
  if [[ $1 == --inputs ]]; then inputs=$2; shift; else kinds+=("$1"); fi
  shift
done
[[ ${1:-} == -- ]] && shift
[[ ${#kinds[@]} -gt 0 ]] || kinds=(address thread)
pytest_arguments=("$@")
[[ ${#pytest_arguments[@]} -gt 0 ]] || pytest_arguments=(tests/aio_ext)

for kind in "${kinds[@]}"; do
  case $kind in
    address)
      flags="-fsanitize=address,undefined -fno-sanitize-recover=undefined"; runtime=asan
      except="sum_is_reached"  # a matter of time, which sanitizers stretch
      ;;
    thread)
      flags="-fsanitize=thread"; runtime=tsan
      except="sum_is_reached or child_cannot_use"  # TSan cannot follow threads that a forked child starts
      ;;
    *) echo "sanitize.sh: no such sanitizer: $kind (address, thread)" >&2; exit 2 ;;
  esac
  build=build/sanitize-$kind
  mkdir -p build
  cmake -S . -B "$build" -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS="$flags -O1 -fno-omit-frame-pointer" \
    -Dpybind11_DIR="$("$python" -m pybind11 --cmakedir)" -DPython_EXECUTABLE="$(command -v "$python")" >"$build.log" 2>&1 \
    || { cat "$build.log"; exit 1; }
  cmake --build "$build" --target _aio aio_core_test --parallel

  # liburing maps and unmaps rings by bare system calls, which TSan does not see: a new ring at the addresses of an old
  # one looks like a race between their threads. Each ring is touched by one thread only, in UringEngine.
  printf 'race_top:liburing\nrace_top:io_uring_\n' >"$build/tsan-suppressions"
  tsan_options="die_after_fork=0:suppressions=$PWD/$build/tsan-suppressions"

  echo "== $kind: the core's test program"
  # A Python process leaks on purpose at exit, so leaks are looked for here only. A child of fork goes on under TSan.
  scratch=$(mktemp -d)
  trap 'rm -rf "$scratch"' EXIT
  ASAN_OPTIONS=detect_leaks=1 TSAN_OPTIONS=$tsan_options "$build/aio_ext/aio_core_test" "$scratch"

  echo "== $kind: the Python suite"
  site=$build/site
  rm -rf "$site"
  mkdir -p "$site"
  cp -r aio_ext swapper offload scripts tests pyproject.toml "$site/"
  rm -f "$site"/aio_ext/_aio*.so
  cp "$build"/aio_ext/_aio*.so "$site/aio_ext/"
  # pytest catches what is printed, so reports go to files. The C++ library comes along, so that the sanitizer finds what
  # throws exceptions when it starts.
  report=$PWD/$build/report
  rm -f "$report".*
  libraries="$(${CXX:-c++} -print-file-name=lib$runtime.so) $(${CXX:-c++} -print-file-name=libstdc++.so.6)"
  (
    cd "$site"
    # The tests look for SIGSEGV where there must be one, so it is not to be caught.
    LD_PRELOAD=$libraries ASAN_OPTIONS=detect_leaks=0:handle_segv=0:log_path=$report \
      TSAN_OPTIONS=$tsan_options:handle_segv=0:log_path=$report \
      "$python" -m pytest -q -p no:cacheprovider -k "not ($except)" "${pytest_arguments[@]}"
  ) || { cat "$report".* 2>/dev/null; exit 1; }

  if [[ $kind == address ]]; then
    echo "== $kind: the fuzzer of files"
    kernels=$(cd / && "$python" -c "import offload.kernels._kernels as kernels; print(kernels.__file__)")
    cp -u "$kernels" "$site/offload/kernels/"
    # What was freed is kept back from reuse for a while, and would count as memory that the reader has taken.
    (
      cd "$site"
      LD_PRELOAD=$libraries ASAN_OPTIONS=detect_leaks=0:quarantine_size_mb=8:log_path=$report \
        "$python" scripts/fuzz_files.py --count "$inputs"
    ) || { cat "$report".* 2>/dev/null; exit 1; }
  fi
done
