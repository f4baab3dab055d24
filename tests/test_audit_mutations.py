"""Seeded hazards at random lines of real models' steps, transformers' and ours: each found with its rule and line."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("triton")

import compiled_kv as ckv
from compiled_kv.auditor import audit
from compiled_kv.models.llama import PagedLlama
from compiled_kv.models.step import PagedCausalLM
from tests import toy_op, transformers_steps
from tests.mutations import HAZARDS, mutate, sites

COUNT = 110 if "COMPILED_KV_EXAMPLES" in os.environ else 11
LAYOUT = ckv.KVLayout(page_size=16, max_context_len=128)
PARTS = ("Attention", "MLP", "DecoderLayer", "Model", "ForCausalLM")
MODELS = ("llama", "gemma3", "qwen3", "deepseek_v3")


def ours() -> tuple[Any, ...]:
    """Arguments of our paged Llama's step, on the meta device."""
    cls, config = transformers_steps.MODELS["llama"]
    with torch.device("meta"):
        step = PagedLlama(cls(config).eval(), LAYOUT, max_reqs=4, num_pages=40)
        ids, rows = torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
        lens, live = torch.ones(2, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    return step, ids, rows, lens, live


def run(step: Any, *arguments: Any) -> Any:
    return step(*arguments)


def places() -> list[tuple[str, type, str]]:
    """(model, class, method) of every method to mutate."""
    found = [("ours", PagedLlama, "attend"), ("ours", PagedCausalLM, "layer"), ("ours", PagedCausalLM, "forward")]
    for name in MODELS:
        cls, config = transformers_steps.MODELS[name]
        with torch.device("meta"):
            kinds = {type(module) for module in cls(config).modules()}
        found += [(name, kind, "forward") for kind in kinds if kind.__name__.endswith(PARTS)]
    found.sort(key=lambda place: (place[0], place[1].__name__, place[2]))
    return [place for place in found if sites(getattr(place[1], place[2]))]


def planted(seed: int) -> tuple[str, type, str, str, str]:
    """The model, class and method to change, the rule, and an argument of the step that the method knows."""
    rule = list(HAZARDS)[seed % len(HAZARDS)]
    outermost = rule == "mutated-input"
    fit = [
        place
        for place in places()
        if not outermost or (place[1].__name__.endswith("CausalLM") and place[2] == "forward")
    ]
    if rule == "recompile":  # dynamo names the first guard that fails, and Gemma 3's own step has one
        fit = [place for place in fit if place[0] != "gemma3"]
    name, cls, method = random.Random(seed).choice(fit)
    return name, cls, method, rule, "token_ids" if name == "ours" else "input_ids"


@pytest.mark.parametrize("seed", range(COUNT))
def test_planted_hazard_is_found_with_its_line(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, cls, method, rule, argument = planted(seed)
    file = tmp_path / "mutated.py"
    for needed, value in (("torch", torch), ("bump_out", toy_op.bump_out), ("bump_pair_out", toy_op.bump_pair_out)):
        monkeypatch.setattr(sys.modules[cls.__module__], needed, value, raising=False)
    changed, line = mutate(getattr(cls, method), rule, argument, file, random.Random(seed))
    example = ours() if name == "ours" else transformers_steps.example(name, "static", layers=1)
    step = run if name == "ours" else transformers_steps.step
    monkeypatch.setattr(cls, method, changed)
    report = audit(step, *example)
    found = {(each.rule, each.file, each.line) for each in report.findings}
    text = file.read_text().splitlines()[line - 1]
    assert (rule, str(file), line) in found, f"{cls.__name__}.{method}: {rule}: {text.strip()}\n{report}"


def test_our_step_unmutated_has_no_finding() -> None:
    report = audit(run, *ours())
    assert report.findings == () and report.ok, str(report)
    assert list((report.launches or {}).values()) == [1]
