#!/usr/bin/env bash
# The tests in environments that users have, each made anew in a folder of its own: other interpreters, other releases of torch.
#
#   scripts/environments.sh DIR [PYTHON,torch==VERSION[,LIBRARY==VERSION...]...] [-- pytest's arguments]
#
# Default: the oldest that is supported, and one whose torch cannot exchange the memory of storages. What DIR/NAME has
# already is kept, so a second call only runs the tests. They take about 10 GB for each, with a torch for CUDA.
set -euo pipefail

source_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
(($#)) || { sed -n 's/^#   //p' "${BASH_SOURCE[0]}" >&2; exit 2; }
folder=$1
shift
wanted=()
while (($#)) && [[ $1 != -- ]]; do
  wanted+=("$1")
  shift
done
(($#)) && shift
((${#wanted[@]})) || wanted=(3.10,torch==2.8.0,numpy==1.26.4,torchao==0.14.1,peft==0.18.1 3.12,torch==2.11.0)

failed=()
for environment in "${wanted[@]}"; do
  python=${environment%%,*}
  copy=$folder/$environment
  mkdir -p "$copy"
  git -C "$source_root" ls-files -z | (cd "$source_root" && tar --null --create --files-from=-) | tar -x -C "$copy"
  tr , '\n' <<<"${environment#*,}" | tee "$copy/libraries.txt" | grep '^torch==' >"$copy/scripts/constraints.txt"
  echo "== Python $environment"
  (
    cd "$copy"
    export PYTHON="python$python" PIP_CONSTRAINT="$copy/libraries.txt"
    source scripts/setup.sh
    "$venv/bin/python" -c 'import numpy, platform, torch; print(platform.python_version(), torch.__version__, numpy.__version__)'
    export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive
    "$venv/bin/python" -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal --all -p no:cacheprovider "$@"
  ) || failed+=("$environment")
done
((!${#failed[@]})) || { echo "failed: ${failed[*]}" >&2; exit 1; }
