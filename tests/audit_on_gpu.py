"""Hold the auditor's verdicts on the corpus against a CUDA device: `python -m tests.audit_on_gpu DIRECTORY`.

Each step is measured in a process of its own, several at a time (nothing is timed), while the audits run here. It ends
after `--seconds`: what had no turn by then is listed as such. Written to DIRECTORY: audit_on_gpu.json, with everything,
and audit_on_gpu.md, with the confusion tables.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from compiled_kv.auditor import audit
from compiled_kv.auditor.apart import measure_apart
from compiled_kv.auditor.comparison import WAITING
from compiled_kv.auditor.errors import said
from compiled_kv.auditor.measured import Measured, count
from tests.audit_corpus.arguments import arguments
from tests.audit_corpus.clean import CLEAN
from tests.audit_corpus.hazards import HAZARDS

STEPS = {**HAZARDS, **CLEAN}
REFUSED = (*WAITING, "unsafe-under-capture")
SKIPPED = (*REFUSED, "graph-break", "cpu-tensor", "mutated-input", "output-fed-back", "recompile")
STEP_SECONDS = 120.0


@dataclass(frozen=True)
class Result:
    """A step's static rules (above a note), and what the device showed; a text says why one of them is missing."""

    name: str
    rules: tuple[str, ...] | str
    measured: Measured | str


@dataclass(frozen=True)
class Question:
    """Something that both sides answer with yes or no; None is no answer."""

    title: str
    rules: tuple[str, ...]
    seen: Callable[[Measured], bool | None]

    def answers(self, result: Result) -> tuple[bool, bool] | None:
        if isinstance(result.rules, str) or isinstance(result.measured, str):
            return None
        seen = self.seen(result.measured)
        return None if seen is None else (any(rule in self.rules for rule in result.rules), seen)


def waited(measured: Measured) -> bool | None:
    return None if measured.waits is None and measured.waits_raised is None else measured.waited


def refused(measured: Measured) -> bool | None:
    return None if measured.captured is None else not measured.captured


def skipped(measured: Measured) -> bool | None:
    if "reduce-overhead" in measured.failures:
        return True
    if measured.replayed is None or not measured.kernels:  # a step that runs nothing on the device has no graph
        return None
    return bool(measured.skips) or measured.replayed != 1


QUESTIONS = (
    Question("the host waits in a compiled step", WAITING, waited),
    Question("a compiled step cannot be captured by hand", REFUSED, refused),
    Question('mode="reduce-overhead" does not replay the step as one CUDA graph, or raises', SKIPPED, skipped),
)


def static_rules(name: str, target: str) -> tuple[str, ...] | str:
    try:
        report = audit(STEPS[name], *arguments(STEPS[name]), target=target)
    except Exception as error:
        return f"audit: {said(error)}"
    return tuple(sorted({each.rule for each in report.at_least("warning")}))


def measured(name: str, end: float) -> Measured | str:
    left = end - time.monotonic()
    if left < 1:
        return "not run: no time was left"
    try:
        return measure_apart(f"tests.audit_corpus.entries:{name}", seconds=min(STEP_SECONDS, left))
    except Exception as error:
        return said(error)


def collect(names: Sequence[str], target: str, seconds: float, workers: int) -> list[Result]:
    end = time.monotonic() + seconds
    with ThreadPoolExecutor(workers) as pool:
        turns = random.Random(0).sample(names, len(names))  # where time runs out, it does so for all kinds alike
        running = {name: pool.submit(measured, name, end) for name in turns}
        rules = {name: static_rules(name, target) for name in names}
        return [Result(name, rules[name], running[name].result()) for name in names]


def confusion(question: Question, results: Sequence[Result]) -> list[str]:
    answers = {each.name: question.answers(each) for each in results}
    groups = {pair: [name for name, got in answers.items() if got == pair] for pair in BOTH}
    lines = [f"### {question.title}", "", "| | the device: yes | the device: no |", "|---|---|---|"]
    for said_so, word in ((True, "yes"), (False, "no")):
        lines.append(f"| the audit: {word} | {len(groups[said_so, True])} | {len(groups[said_so, False])} |")
    for pair, text in ((True, False), "the audit alone"), ((False, True), "the device alone"):
        lines += ["", f"{text}: {', '.join(groups[pair]) or 'none'}"]
    unknown = [name for name, got in answers.items() if got is None]
    return [*lines, "", f"not compared: {', '.join(unknown) or 'none'}", ""]


BOTH = [(a, b) for a in (True, False) for b in (True, False)]


def by_rule(results: Sequence[Result]) -> list[str]:
    """How many steps with each rule showed what."""
    rules = sorted({rule for each in results for rule in (each.rules if isinstance(each.rules, tuple) else ())})
    lines = ["| static | steps | waits | not captured | skipped |", "|---|---|---|---|---|"]
    for rule in ["clean", *rules]:
        fit = [each for each in results if isinstance(each.rules, tuple) and rule in (each.rules or ("clean",))]
        seen = [each.measured for each in fit if isinstance(each.measured, Measured)]
        numbers = (sum(bool(question.seen(each)) for each in seen) for question in QUESTIONS)
        lines.append(f"| {rule} | {len(fit)} | {' | '.join(map(str, numbers))} |")
    return [*lines, ""]


def row(result: Result) -> str:
    rules = result.rules if isinstance(result.rules, str) else ", ".join(result.rules) or "clean"
    if isinstance(result.measured, str):
        cells = [rules, result.measured, "", "", "", ""]
    else:
        seen = result.measured
        waits = f"{count(seen.waits)} ({seen.waits_raised or 'nothing raised'})"
        kernels = "unknown" if seen.kernels is None else str(sum(seen.kernels.values()))
        failures = "; ".join(f"{part}: {text}" for part, text in seen.failures.items())
        cells = [rules, waits, seen.by_hand(), seen.reduced(), kernels, failures]
    return f"| {result.name} | {' | '.join(text.replace('|', '/') for text in cells)} |"


def markdown(results: Sequence[Result]) -> str:
    ran = [each.measured for each in results if isinstance(each.measured, Measured)]
    where = f"{ran[0].device}, {ran[0].versions}" if ran else "nothing was measured"
    lines = ["# The corpus on a device", "", f"{date.today()}, {where}: {len(ran)} of {len(results)} steps ran.", ""]
    for question in QUESTIONS:
        lines += confusion(question, results)
    lines += ["### By rule", "", *by_rule(results), "### By step", ""]
    lines += [
        "| step | static | waits | by hand | reduce-overhead | kernels | failed |",
        "|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *map(row, results)]) + "\n"


def write(directory: Path, results: Sequence[Result]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "audit_on_gpu.md").write_text(markdown(results), encoding="utf-8")
    kept: list[Mapping[str, Any]] = [asdict(each) for each in results]
    (directory / "audit_on_gpu.json").write_text(json.dumps(kept, indent=1), encoding="utf-8")


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--target", default="cuda")
    parser.add_argument("--steps", nargs="*", default=list(STEPS), choices=list(STEPS), metavar="NAME")
    asked = parser.parse_args(given)
    for name in ("TORCHINDUCTOR_COMPILE_THREADS", "OMP_NUM_THREADS"):
        os.environ.setdefault(name, "1")  # the processes are what runs side by side
    results = collect(asked.steps, asked.target, asked.seconds, asked.workers)
    write(asked.directory, results)
    print(markdown(results))


if __name__ == "__main__":
    main()
