#!/bin/bash
# STEPS and MODES shorten or split the scenarios.
# Everything about replay that needs a GPU: tests, long scenarios, host and device times. Results go to $OUT (default: build).
#   tools/gpu_replay.sh [tests|scenarios|host|device|sanitizer|all] [trace.csv]
set -u
cd "$(dirname "$0")/.."
what=${1:-all} trace=${2:-../shared/traces/azure_llm_2023_conv.csv} out=${OUT:-build} python=${PYTHON:-python3}
mkdir -p "$out"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
failed=0

run() {
    local name=$1
    shift
    echo "== $name"
    "$@" >"$out/replay_$name.log" 2>&1
    local rc=$?
    tail -n 40 "$out/replay_$name.log"
    [ $rc -eq 0 ] || { failed=1; echo "== $name failed: $rc"; }
}

wanted() { [ "$what" = all ] || [ "$what" = "$1" ]; }

wanted tests && run tests "$python" -m pytest -q -m gpu tests/test_updates.py tests/test_buffers.py tests/test_replay.py --durations=5
wanted host && run host "$python" tools/gpu_replay.py host
wanted device && run device "$python" tools/gpu_replay.py device
wanted scenarios && run scenarios "$python" tools/gpu_replay.py scenarios --steps "${STEPS:-20000}" --trace "$trace" \
    --modes ${MODES:-decode verify}
if [ "$what" = sanitizer ]; then
    for tool in memcheck racecheck initcheck synccheck; do
        PYTORCH_NO_CUDA_MEMORY_CACHING=1 run "$tool" compute-sanitizer --tool "$tool" --error-exitcode 9 \
            "$python" -m pytest -q -m gpu tests/test_updates.py -k "only_what_changed or window or drafts"
    done
fi
exit $failed
