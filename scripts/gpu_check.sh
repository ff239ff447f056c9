#!/bin/bash
# On a machine with a GPU: build, test (-m gpu) and time all that uses it, as one table for docs/gpu.md.
# Without one everything is built and each line says why it was not run.
set -u
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}
make build VENV="$venv" >/dev/null || exit 1
line() { printf '%-34s %s\n' "$1" "$2"; }
line date "$(date -u +%F)"
line gpu "$(nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null | paste -sd';' || true)"
"$venv"/bin/python -m pip install -q 'nccl4py[cu13]>=0.6' >/dev/null 2>&1
line nccl4py "$("$venv"/bin/python -c 'import nccl.core as n; print(n.__version__)' 2>/dev/null || echo 'not installed')"
"$venv"/bin/python -m pytest -q -m gpu -p no:cacheprovider 2>&1 | grep -E '^(SKIPPED|FAILED|ERROR)|passed|failed|skipped' | while read -r said; do line tests "$said"; done
OMP_NUM_THREADS=1 "$venv"/bin/python benchmarks/bench_device.py 2>&1 | while read -r said; do line bench_device "$said"; done
