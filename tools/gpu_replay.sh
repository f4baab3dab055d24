#!/bin/bash
# Everything about replay that needs a GPU: tests, the demo, long scenarios, host and device times. Results: $OUT (build).
#   tools/gpu_replay.sh [tests|demo|scenarios|host|device|all] [trace.csv]
# STEPS, MODES and WINDOWS shorten or split the scenarios, e.g. MODES=verify WINDOWS=200. Without a trace file, and with
# none in shared/traces here or beside the repository, lengths are drawn from its quantiles.
set -u
cd "$(dirname "$0")/.." || exit 2
what=${1:-all} trace=${2:-} out=${OUT:-build} python=${PYTHON:-python3}
mkdir -p "$out"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
failed=0 ran=0

for found in shared/traces/*.csv ../shared/traces/*.csv; do
    [ -z "$trace" ] && [ -f "$found" ] && trace=$found
done

run() {
    local name=$1
    shift
    ran=1
    echo "== $name"
    "$@" >"$out/replay_$name.log" 2>&1
    local rc=$?
    tail -n 45 "$out/replay_$name.log"
    [ $rc -eq 0 ] || { failed=1; echo "== $name failed: $rc"; }
}

wanted() { [ "$what" = all ] || [ "$what" = "$1" ]; }

wanted tests && run tests "$python" -m pytest -q -m gpu tests/test_updates.py tests/test_buffers.py \
    tests/test_loading.py tests/test_mailbox.py tests/test_replay.py --durations=5
wanted demo && run demo_drafts "$python" -m compiled_kv demo --device cuda --model all --draft-tokens 4
wanted demo && run demo_plain "$python" -m compiled_kv demo --device cuda --model all
wanted host && run host "$python" tools/gpu_replay.py host
wanted device && run device "$python" tools/gpu_replay.py device
# shellcheck disable=SC2086
wanted scenarios && run scenarios "$python" tools/gpu_replay.py scenarios --steps "${STEPS:-20000}" \
    ${trace:+--trace "$trace"} --modes ${MODES:-decode verify} --windows ${WINDOWS:-0 200}
[ $ran -eq 1 ] || { echo "nothing is called $what: tests, demo, scenarios, host, device or all" >&2; exit 2; }
exit $failed
