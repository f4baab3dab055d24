#!/bin/sh
# Everything that docs/benchmarks.md shows, on a CUDA device: results.json, results.md and figures.
#   tools/gpu_bench.sh [folder]        TRACE=requests.csv for the trace cells, PYTHON=python3.12, ARGS='--seconds 300'
# Again with the same folder, it does what is left.
set -u
cd "$(dirname "$0")/.." || exit 2
out=${1:-build/bench} python=${PYTHON:-python3} failed=0
# shellcheck disable=SC2086
"$python" -m compiled_kv.bench --out "$out" ${TRACE:+--trace "$TRACE"} ${ARGS:-} || failed=1
"$python" -m compiled_kv.bench.step --out "$out" || failed=1
"$python" -m compiled_kv.bench --report --out "$out" --plots "$out/img" || failed=1
exit $failed
