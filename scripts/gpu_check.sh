#!/usr/bin/env bash
# On a machine with a GPU, CUDA, PyTorch and build tools, without a network: builds in place, tests, measures, and prints
# one table and one JSON object. Within 10 minutes; a part that takes too long is ended and said so.
#
#   scripts/gpu_check.sh [PART...]     parts: build test bench soak sanitize (default: all of them, in this order)
#
# Environment:
#   PYTHON     the interpreter that holds PyTorch (default: python3)
#   NVME       a folder on the SSD to use (default: a new one in $TMPDIR)
#   OUT        where to leave gpu_check.json, traces and logs (default: build/gpu)
#   SIZES      models of the benchmark (default: "llama:16x2048 llama:32x4096")
#   LIBURING_ROOT, or .deps/liburing in the project: an unpacked liburing-dev, where there is none installed
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root" || exit 1
python=${PYTHON:-python3}
out=${OUT:-$root/build/gpu}
sizes=${SIZES:-llama:16x2048 llama:32x4096}
parts=("$@")
((${#parts[@]})) || parts=(build test bench soak sanitize)
mkdir -p "$out"
nvme=${NVME:-$(mktemp -d)}
export PYTHONPATH=$root PYTHONUNBUFFERED=1 CUBLAS_WORKSPACE_CONFIG=:4096:8

# Runs one part under its own limit of seconds; what it printed is in its log.
part() {
  local name=$1 limit=$2 started=$SECONDS code
  shift 2
  timeout "$limit" "$@" >"$out/$name.log" 2>&1
  code=$?
  printf '%s\t%s\t%s\n' "$name" "$code" "$((SECONDS - started))" >>"$out/parts.tsv"
}

build() {
  local cmake_dir suffix
  cmake_dir=$("$python" -m pybind11 --cmakedir) || return
  suffix=$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
  cmake -S "$root" -B build/gpu-build -DCMAKE_PREFIX_PATH="$cmake_dir" -DPython_EXECUTABLE="$(command -v "$python")" &&
    cmake --build build/gpu-build --parallel --target _aio _kernels &&
    cp "build/gpu-build/aio_ext/_aio$suffix" aio_ext/ &&
    cp "build/gpu-build/offload/kernels/_kernels$suffix" offload/kernels/
}

bench() {
  local size
  for size in $sizes; do
    timeout 240 "$python" scripts/bench_step.py --device cuda --precision bf16 --checkpointing --batch 4 --context 2048 \
      --sizes "$size" --systems in_memory engine --budgets all least --rounds 1 --warm-up 2 --steps 4 --clipping 0 \
      --nvme-path "$nvme" --json >"$out/bench-${size//:/-}.json" || echo "$size ended with $?"
  done
}
export -f build bench
export root python out sizes nvme

: >"$out/parts.tsv"
for name in "${parts[@]}"; do
  case $name in
    build) part build 180 bash -c build ;;
    test) part test 150 "$python" -m pytest -q -p no:cacheprovider tests/offload/test_cuda.py tests/offload/test_device.py ;;
    bench) part bench 330 bash -c bench ;;
    soak) part soak 90 "$python" scripts/soak.py --device cuda --json --nvme-path "$nvme" ;;
    sanitize) part sanitize 120 compute-sanitizer --error-exitcode 9 "$python" -m pytest -q -p no:cacheprovider \
      tests/offload/test_cuda.py -k "same_bits and bf16" ;;
    *) echo "gpu_check: no part $name; parts: build test bench soak sanitize" >&2; exit 2 ;;
  esac
done
exec "$python" scripts/_gpu_report.py "$out"
