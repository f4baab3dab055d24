"""Replay on one GPU: long scenarios compared byte for byte, host time of a step, device time of the update.

    python tools/gpu_replay.py scenarios --trace FILE       plain and verify, with and without a window
    python tools/gpu_replay.py host                         a step four ways, and above a bare launch and copy
    python tools/gpu_replay.py device                       the update beside the full rebuild and the floor

Each prints one JSON object a line. `gpu_replay.sh` runs them with the repository on Python's path.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from replay_times import host, say
from update_times import device

from compiled_kv.replay.check import check_replay, metadata_step
from compiled_kv.replay.player import ReplayFault
from compiled_kv.replay.scenarios import Scenario, serving, story, trace, walk
from compiled_kv.request_traces import read_trace, synthetic_trace


def scenarios(steps: int, path: Path | None, modes: list[str], windows: list[int], on: str) -> bool:
    """Play the story, the trace and a random walk; whether no fault was found."""
    read = read_trace(path) if path else synthetic_trace(5000, seed=0)
    lengths = [(row.context, row.generated) for row in read]
    say(what="trace", file=str(path) if path else "synthetic", requests=len(lengths))
    sound = True
    for mode in modes:
        for window in windows:
            given = serving(mode, page_size=16, max_context_len=2048, max_batch_size=16, window=window or None)
            for scenario in (story(given), trace(given, lengths, steps), walk(given, steps, seed=1)):
                sound &= played(scenario, mode, window or None, on)
    say(what="scenarios", steps=steps, no_difference=sound)
    return sound


def played(scenario: Scenario, mode: str, window: int | None, on: str) -> bool:
    begin, every = time.time(), 1 if scenario.steps < 1000 else 25
    line = {"what": "scenario", "mode": mode, "window": window}
    try:
        report = check_replay(metadata_step, scenario, device=on, outputs_every=every, attempts=60)
    except ReplayFault as fault:
        say(**line, fault=str(fault), seconds=round(time.time() - begin, 1))
        return False
    enough = report.steps == scenario.steps and (report.steps < 1000 or report.preemptions > 0)
    say(**line, report=str(report), enough=enough, seconds=round(time.time() - begin, 1))
    return enough


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["scenarios", "host", "device"])
    parser.add_argument("--steps", type=int, default=20000)
    parser.add_argument("--trace", type=Path, help="without: a synthetic one")
    parser.add_argument("--modes", nargs="+", default=["decode", "verify"])
    parser.add_argument("--windows", nargs="+", type=int, default=[0, 200], help="sliding windows in tokens; 0: none")
    parser.add_argument("--device", default="cuda", help="of the scenarios; cpu to try them")
    given = parser.parse_args()
    if given.device != "cpu":
        say(what="device name", name=torch.cuda.get_device_name(), torch=torch.__version__)
    if given.what == "scenarios":
        sound = scenarios(given.steps, given.trace, given.modes, given.windows, given.device)
    else:
        sound = host() if given.what == "host" else device()
    sys.exit(not sound)


if __name__ == "__main__":
    main()
