#!/usr/bin/env bash
# On a machine with a GPU, CUDA, PyTorch and build tools, without a network: builds in place, tests, measures, and prints
# what a reader wants first, then a table of the parts, and one JSON object. Ends within LIMIT seconds: a part gets what
# those before it have left, and one that takes too long is ended and said so.
#
#   scripts/gpu_check.sh [PART...]     parts, in this order: build test kernels bench soak ranks races memory (default: all)
#
#     build    the native extensions, with pybind11 or with its headers in torch
#     test     the tests of the GPU, of its kernels' text and of the device's logic
#     kernels  each kernel's bits and share of the memory's bandwidth, and the link's (scripts/bench_gpu_kernels.py)
#     bench    a step against its bound (scripts/bench_step.py)
#     soak     many steps, whose memory must not grow (scripts/soak.py)
#     ranks    several GPUs: the tests of ranks, and a step beside FSDP2 and DDP (scripts/bench_ranks.py); nothing on one
#     races    compute-sanitizer: races in the kernels' shared memory
#     memory   compute-sanitizer: bad addresses, and memory used before its allocation or after its end in stream order
#
# Environment:
#   PYTHON     the interpreter that holds PyTorch (default: python3)
#   NVME       a folder on the SSD to use (default: a new one in $TMPDIR)
#   OUT        where to leave gpu_check.json and logs.tgz (default: build/gpu)
#   LIMIT      seconds for all parts together (default: 580)
#   SIZES      models of the benchmark, a part each (default: llama:16x2048; llama:32x4096 needs 100 GB of RAM or disk)
#   BENCH      further arguments of scripts/bench_step.py (default: "--systems in_memory engine --budgets all least")
#   STEPS      of the soak (default: 150)
#   LIBURING_ROOT, or .deps/liburing in the project: an unpacked liburing-dev, where there is none installed
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root" || exit 1
python=${PYTHON:-python3}
work=$root/build/gpu
out=${OUT:-$work}
bench=${BENCH:---systems in_memory engine --budgets all least}
parts=("$@")
((${#parts[@]})) || parts=(build test kernels bench soak ranks races memory)
rm -rf "$work"
mkdir -p "$work" "$out"
nvme=${NVME:-$(mktemp -d)}
export PYTHONPATH=$root PYTHONUNBUFFERED=1 CUBLAS_WORKSPACE_CONFIG=:4096:8
ends=$((SECONDS + ${LIMIT:-580}))

# Runs one part in what time is left, at most its own limit of seconds; what it printed is in its log.
part() {
  local name=$1 limit=$2 started=$SECONDS left=$((ends - SECONDS)) code=124
  shift 2
  if ((left < 5)); then
    echo "no time was left" >"$work/$name.log"
  else
    timeout --kill-after=5 "$((left < limit ? left : limit))" "$@" >"$work/$name.log" 2>&1
    code=$?
  fi
  printf '%s\t%s\t%s\n' "$name" "$code" "$((SECONDS - started))" >>"$work/parts.tsv"
}

build() {
  local pybind11 suffix
  pybind11=$("$python" -m pybind11 --cmakedir 2>/dev/null) || pybind11=$root/scripts/pybind11
  suffix=$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
  torch=$("$python" -c 'import importlib.util as util; print(util.find_spec("torch").submodule_search_locations[0])')
  command -v make >/dev/null || export CMAKE_GENERATOR=Ninja
  cmake -S "$root" -B build/gpu-build -Dpybind11_DIR="$pybind11" -DTORCH_INCLUDE="$torch/include" \
    -DPython_EXECUTABLE="$(command -v "$python")" &&
    cmake --build build/gpu-build --parallel --target _aio _kernels &&
    cp "build/gpu-build/aio_ext/_aio$suffix" aio_ext/ &&
    cp "build/gpu-build/offload/kernels/_kernels$suffix" offload/kernels/
}
export -f build
export root python

tests=("$python" -m pytest -q -rfE --tb=short -p no:cacheprovider -o faulthandler_timeout=100)
sanitizer=(compute-sanitizer --error-exitcode 9 --report-api-errors no)
{ df -T "$nvme" "$root"; free -m; echo "locked memory: $(ulimit -l)"; } >"$work/machine.log" 2>&1
: >"$work/parts.tsv"
for name in "${parts[@]}"; do
  case $name in
    build) part build 240 bash -c build ;;
    test)
      part test 240 "${tests[@]}" tests/offload/test_cuda.py tests/kernels/test_gpu.py tests/kernels/test_gpu_assembly.py \
        tests/offload/test_gpu_programs.py tests/offload/test_device.py ;;
    kernels) part kernels 90 "$python" scripts/bench_gpu_kernels.py --json ;;
    bench)
      for size in ${SIZES:-llama:16x2048}; do
        # shellcheck disable=SC2086
        part "bench-${size//:/-}" 240 "$python" scripts/bench_step.py --device cuda --precision bf16 \
          --checkpointing --batch 4 --context 2048 --clipping 0 --rounds 1 --warm-up 2 --steps 4 --sizes "$size" \
          --nvme-path "$nvme" --json $bench
      done ;;
    soak) part soak 120 "$python" scripts/soak.py --device cuda --steps "${STEPS:-150}" --nvme-path "$nvme" ;;
    ranks)
      gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
      if ((gpus > 1)); then
        part ranks-test 200 "${tests[@]}" tests/ranks/test_cuda.py tests/ranks/test_on_device.py
        part ranks-bench 200 "$python" scripts/bench_ranks.py --device cuda --ranks "$gpus" --model 16x2048 --context 1024
      fi ;;
    races)
      part races 90 "${sanitizer[@]}" --tool racecheck "${tests[@]}" tests/offload/test_cuda.py -k sums_of_squares ;;
    memory) # the driver's own allocator, whose blocks the sanitizer follows: torch's hides what is used too late
      PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync part memory 240 "${sanitizer[@]}" --tool memcheck \
        --track-stream-ordered-races all "${tests[@]}" tests/offload/test_cuda.py -k "same_bits and 1-bf16" ;;
    *) echo "gpu_check: no part $name; parts: build test kernels bench soak ranks races memory" >&2; exit 2 ;;
  esac
done
tar -C "$work" -czf "$out/logs.tgz" $(cd "$work" && ls -- *.log)
exec "$python" scripts/_gpu_report.py "$work" "$out/gpu_check.json"
