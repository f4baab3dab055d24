"""Seeded hazards at random lines of real models' steps, transformers' and ours: each found with its rule and line."""

from __future__ import annotations

import inspect
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("triton")

from compiled_kv.auditor import audit
from compiled_kv.models import NAMES, architecture
from tests import paged_steps, toy_op, transformers_steps
from tests.mutations import HAZARDS, mutate, sites

COUNT = 110 if "COMPILED_KV_EXAMPLES" in os.environ else 11
PARTS = ("Attention", "MLP", "DecoderLayer", "Model", "ForCausalLM")
MODELS = ("llama", "gemma3", "qwen3", "deepseek_v3")
OURS = "paged "
OUTERMOST = ("CausalLM", *(architecture(name).paged.__name__ for name in NAMES))
METHODS = ("attend", "forward", "layer", "project", "queries")


def places() -> list[tuple[str, type, str]]:
    """(model, class, method) of every method to mutate."""
    found: list[tuple[str, type, str]] = []
    for name in NAMES:
        cls = architecture(name).paged
        found += [(OURS + name, cls, method) for method in METHODS if hasattr(cls, method)]
    for name in MODELS:
        model, config = transformers_steps.MODELS[name]
        with torch.device("meta"):
            kinds = {type(module) for module in model(config).modules()}
        found += [(name, kind, "forward") for kind in kinds if kind.__name__.endswith(PARTS)]
    found.sort(key=lambda place: (place[0], place[1].__name__, place[2]))
    return [place for place in found if can_be_mutated(getattr(place[1], place[2]))]


def can_be_mutated(method: Any) -> bool:
    """Whether it has a place for a hazard, and can be compiled outside its class."""
    return "super()" not in inspect.getsource(method) and bool(sites(method))


def planted(seed: int) -> tuple[str, type, str, str, str]:
    """The model, class and method to change, the rule, and an argument of the step that the method knows."""
    rule = list(HAZARDS)[seed % len(HAZARDS)]
    outermost = rule == "mutated-input"
    fit = [
        place
        for place in places()
        if not outermost or (place[2] == "forward" and place[1].__name__.endswith(OUTERMOST))
    ]
    if rule == "recompile":  # dynamo names the first guard that fails, and Gemma 3's own step has one
        fit = [place for place in fit if place[0] != "gemma3"]
    name, cls, method = random.Random(seed).choice(fit)
    return name, cls, method, rule, "token_ids" if name.startswith(OURS) else "input_ids"


def given(name: str) -> tuple[tuple[Any, ...], Any]:
    """Arguments of a model's step, and the step."""
    if name.startswith(OURS):
        return paged_steps.example(name.removeprefix(OURS)), paged_steps.decode
    return transformers_steps.example(name, "static", layers=1), transformers_steps.step


@pytest.mark.parametrize("seed", range(COUNT))
def test_planted_hazard_is_found_with_its_line(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, cls, method, rule, argument = planted(seed)
    file = tmp_path / "mutated.py"
    for needed, value in (("torch", torch), ("bump_out", toy_op.bump_out), ("bump_pair_out", toy_op.bump_pair_out)):
        monkeypatch.setitem(inspect.unwrap(getattr(cls, method)).__globals__, needed, value)
    changed, line = mutate(getattr(cls, method), rule, argument, file, random.Random(seed))
    example, step = given(name)
    monkeypatch.setattr(cls, method, changed)
    report = audit(step, *example)
    found = {(each.rule, each.file, each.line) for each in report.findings}
    text = file.read_text().splitlines()[line - 1]
    assert (rule, str(file), line) in found, f"{cls.__name__}.{method}: {rule}: {text.strip()}\n{report}"
