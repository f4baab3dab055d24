#!/bin/sh
# Everything that docs/benchmarks.md shows, on a CUDA device: results.json, results.md and figures.
#   tools/gpu_bench.sh [folder]        TRACE=requests.csv for the trace cells, PYTHON=python3.12, ARGS='--seconds 300'
set -eu
cd "$(dirname "$0")/.."
out=${1:-build/bench}
exec "${PYTHON:-python3}" -m compiled_kv.bench --out "$out" --plots "$out/img" ${TRACE:+--trace "$TRACE"} ${ARGS:-}
