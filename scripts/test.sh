#!/usr/bin/env bash
# Lint, spelling, types, the direction of imports, and tests. Further arguments go to pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

cd "$root"
"$venv/bin/python" -m ruff check .
"$venv/bin/codespell" README.md CHANGELOG.md docs offload aio_ext swapper scripts tests
"$venv/bin/lint-imports"
types=$(mktemp)
trap 'kill "$mypy" 2>/dev/null || true; rm -f "$types"' EXIT
"$venv/bin/python" -m mypy >"$types" 2>&1 & # takes a minute of one core, and tests wait now and then
mypy=$!
# pytest rewrites the assertions of all files, and keeps what it has made: once, before each process does so for itself.
OMP_NUM_THREADS=1 "$venv/bin/python" -m pytest --collect-only --quiet "$@" >/dev/null 2>&1 || true
# More processes than small machines have cores: many tests wait for a disk, for another rank or for a process that they
# have started.
# Each has one thread of torch, and those of tests that ask for more wait without spinning.
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive
failed=0
"$venv/bin/python" -m pytest --numprocesses 4 --dist worksteal "$@" || failed=$?
wait "$mypy" || failed=$?
cat "$types"
exit "$failed"
