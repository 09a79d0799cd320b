#!/usr/bin/env bash
# On a machine with a GPU, CUDA, PyTorch and build tools, without a network: builds in place, tests, measures, and prints
# one table and one JSON object. Within 10 minutes; a part that takes too long is ended and said so.
#
#   scripts/gpu_check.sh [PART...]     parts: build test bench soak sanitize (default: all of them, in this order)
#
# Environment:
#   PYTHON     the interpreter that holds PyTorch (default: python3)
#   NVME       a folder on the SSD to use (default: a new one in $TMPDIR)
#   OUT        where to leave gpu_check.json and logs.tgz (default: build/gpu)
#   SIZES      models of the benchmark, a part each (default: llama:16x2048; llama:32x4096 needs 100 GB of RAM or disk)
#   BENCH      further arguments of scripts/bench_step.py (default: "--systems in_memory engine --budgets all least")
#   BENCH_LIMIT  seconds a size may take (default: 180)
#   LIBURING_ROOT, or .deps/liburing in the project: an unpacked liburing-dev, where there is none installed
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root" || exit 1
python=${PYTHON:-python3}
work=$root/build/gpu
out=${OUT:-$work}
bench=${BENCH:---systems in_memory engine --budgets all least}
parts=("$@")
((${#parts[@]})) || parts=(build test bench soak sanitize)
rm -rf "$work"
mkdir -p "$work" "$out"
nvme=${NVME:-$(mktemp -d)}
export PYTHONPATH=$root PYTHONUNBUFFERED=1 CUBLAS_WORKSPACE_CONFIG=:4096:8
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True

# Runs one part under its own limit of seconds; what it printed is in its log.
part() {
  local name=$1 limit=$2 started=$SECONDS code
  shift 2
  timeout --kill-after=10 "$limit" "$@" >"$work/$name.log" 2>&1
  code=$?
  printf '%s\t%s\t%s\n' "$name" "$code" "$((SECONDS - started))" >>"$work/parts.tsv"
}

build() {
  local cmake_dir suffix
  cmake_dir=$("$python" -m pybind11 --cmakedir) || return
  suffix=$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
  command -v make >/dev/null || export CMAKE_GENERATOR=Ninja
  cmake -S "$root" -B build/gpu-build -DCMAKE_PREFIX_PATH="$cmake_dir" -DPython_EXECUTABLE="$(command -v "$python")" &&
    cmake --build build/gpu-build --parallel --target _aio _kernels &&
    cp "build/gpu-build/aio_ext/_aio$suffix" aio_ext/ &&
    cp "build/gpu-build/offload/kernels/_kernels$suffix" offload/kernels/
}
export -f build
export root python

tests=("$python" -m pytest -q -p no:cacheprovider -o faulthandler_timeout=60)
{ df -T "$nvme" "$root"; free -m; echo "locked memory: $(ulimit -l)"; } >"$work/machine.log" 2>&1
: >"$work/parts.tsv"
for name in "${parts[@]}"; do
  case $name in
    build) part build 120 bash -c build ;;
    test) part test 150 "${tests[@]}" tests/offload/test_cuda.py tests/offload/test_device.py ;;
    bench)
      for size in ${SIZES:-llama:16x2048}; do
        # shellcheck disable=SC2086
        part "bench-${size//:/-}" "${BENCH_LIMIT:-180}" "$python" scripts/bench_step.py --device cuda --precision bf16 \
          --checkpointing --batch 4 --context 2048 --clipping 0 --rounds 1 --warm-up 2 --steps 4 --sizes "$size" \
          --nvme-path "$nvme" --json $bench
      done ;;
    soak) part soak 60 "$python" scripts/soak.py --device cuda --steps "${STEPS:-150}" --nvme-path "$nvme" ;;
    sanitize)
      PYTORCH_NO_CUDA_MEMORY_CACHING=1 part sanitize 60 compute-sanitizer --error-exitcode 9 --report-api-errors no \
        "${tests[@]}" tests/offload/test_cuda.py -k "same_bits and 1-bf16" ;;
    *) echo "gpu_check: no part $name; parts: build test bench soak sanitize" >&2; exit 2 ;;
  esac
done
tar -C "$work" -czf "$out/logs.tgz" $(cd "$work" && ls -- *.log)
exec "$python" scripts/_gpu_report.py "$work" "$out/gpu_check.json"
