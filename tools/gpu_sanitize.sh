#!/bin/bash
# compute-sanitizer's four tools over every kernel (tests/sanitize.py), side by side on one CUDA device. Logs: $OUT (build).
#   tools/gpu_sanitize.sh [--every N]        of the named calls only every N-th
# Without the caching allocator each tensor has bounds of its own; captured graphs need it, so they are watched apart.
set -u
cd "$(dirname "$0")/.." || exit 2
out=${OUT:-build} python=${PYTHON:-python3}
mkdir -p "$out"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
eager="schedules peers named large" failed=0 started=()

watch() {
    local name=$1 tool=$2
    shift 2
    compute-sanitizer --tool "$tool" --target-processes all --error-exitcode 9 "$python" -m tests.sanitize "$@" \
        >"$out/sanitize_$name.log" 2>&1 &
    started+=("$name:$!")
}

# shellcheck disable=SC2086
for tool in memcheck initcheck; do
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 watch "$tool" "$tool" "$@" --parts $eager
    watch "${tool}_replays" "$tool" "$@" --parts replays
done
for tool in racecheck synccheck; do
    watch "$tool" "$tool" "$@"
done
for each in "${started[@]}"; do
    wait "${each#*:}" || { failed=1; echo "== ${each%:*} failed: $?"; }
    tail -n 8 "$out/sanitize_${each%:*}.log"
done
exit $failed
