"""Our own paged steps of every architecture, on the meta device: plain decode, verify, a draft step, extend."""

from __future__ import annotations

from typing import Any

import torch

import compiled_kv as ckv
from compiled_kv.models import architecture
from compiled_kv.models.state import SLIDING
from compiled_kv.models.step import layer_types

BATCH, DRAFTS = 2, 4


def decode(model: Any, ids: Any, rows: Any, lens: Any, live: Any) -> Any:
    return model(ids, rows, lens, live)


def verify(model: Any, ids: Any, rows: Any, lens: Any, live: Any) -> Any:
    return model(ids, rows, lens, live, seq_len_delta=DRAFTS)


def draft(model: Any, ids: Any, rows: Any, lens: Any, live: Any) -> Any:
    return model(ids, rows, lens, live, seq_len_delta=2)


def extend(model: Any, ids: Any, rows: Any, lens: Any, live: Any, q_lens: Any) -> Any:
    return model(ids, rows, lens, live, q_lens)


STEPS = {"decode": (decode, 1), "verify": (verify, DRAFTS), "draft": (draft, 1), "extend": (extend, 8)}


def paged(name: str) -> Any:
    """The step's module, with nothing allocated."""
    arch = architecture(name)
    window = arch.config.sliding_window if SLIDING in layer_types(arch.config) else None
    layout = ckv.KVLayout(arch.page_size, max_context_len=128, max_draft_tokens=DRAFTS, window=window)
    with torch.device("meta"):
        model = arch.causal_lm(arch.config).eval()
        return arch.paged(model, layout, max_reqs=4, num_pages=40, num_swa_pages=40 if window else 0)


def example(name: str, mode: str = "decode") -> tuple[Any, ...]:
    """Arguments for the step of `mode`."""
    width = STEPS[mode][1]
    with torch.device("meta"):
        ids, rows = torch.zeros(BATCH, width, dtype=torch.int64), torch.zeros(BATCH, dtype=torch.int64)
        lens, live = torch.ones(BATCH, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    given = paged(name), ids, rows, lens, live
    return (*given, lens.clone()) if mode == "extend" else given
