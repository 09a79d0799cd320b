#!/usr/bin/env bash
# A wheel for each Python, tried where there is no compiler: doctor, a plan and a few steps, from a folder without the sources.
#
#   scripts/wheels.sh DIR [PYTHON...]
#
# Default: the python3.10 to python3.13 that PATH has. DIR gets the wheels, and an environment for each of them while
# it is tried. OFFLOAD_TORCH_INDEX is where torch comes from, as in scripts/setup.sh.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
(($#)) || { sed -n 's/^#   //p' "${BASH_SOURCE[0]}" >&2; exit 2; }
mkdir -p "$1"
folder=$(cd "$1" && pwd)
shift
(($#)) || set -- python3.10 python3.11 python3.12 python3.13

mkdir -p "$folder/nothing" "$folder/nvme"
tiny=(--layers 2 --width 64 --heads 4 --context 32 --batch 2 --steps 3 --verify 2 --host-memory 2MiB)
for python; do
  tag=$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
  venv=$folder/$tag
  "$python" -m venv "$venv"
  pip=("$venv/bin/python" -m pip --disable-pip-version-check --quiet)
  "${pip[@]}" wheel --no-deps --wheel-dir "$folder" "$root"
  "${pip[@]}" install ${OFFLOAD_TORCH_INDEX:+--index-url "$OFFLOAD_TORCH_INDEX"} torch
  (
    cd "$folder/nothing"
    for name in cc c++ gcc g++ clang clang++ cmake ninja; do
      printf '#!/bin/sh\necho "%s: there is no compiler here" >&2\nexit 127\n' "$name" >"$name"
      chmod +x "$name"
    done
    export PATH="$folder/nothing:$venv/bin:/usr/bin:/bin"
    "${pip[@]}" install "$folder"/offload_engine-*-"$tag"-*.whl
    offload doctor "$folder/nvme" >"$folder/$tag.doctor"
    offload plan llama-3.1-8b --gpu 4090 --host-memory 64GiB --nvme 7GB/s,5GB/s,2TB >"$folder/$tag.plan"
    offload train "${tiny[@]}" --nvme-path "$folder/nvme" --out "$folder/$tag.out" --json >"$folder/$tag.json"
    "$venv/bin/python" -c 'import json, sys; sys.exit(json.load(open(sys.argv[1]))["verified"] is not True)' "$folder/$tag.json"
  )
  rm -r "$venv"
  echo "$tag: the wheel works without a compiler"
done
