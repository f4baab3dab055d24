"""What the demo is held to: transformers' own `generate()`, one request at a time, its own cache, none of our code."""

from __future__ import annotations

from typing import Any

import torch

from compiled_kv.demo.requests import Request


def without_tf32() -> None:
    """Keep every float32 product exact, in the reference and in whatever is compiled from now on."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def generate(model: Any, request: Request) -> list[int]:
    """The greedy continuation of `request`."""
    prompt = torch.tensor([request.prompt], device=model.device)
    tokens = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, use_cache=True,
        min_new_tokens=request.new_tokens, max_new_tokens=request.new_tokens,
    )  # fmt: skip
    return tokens[0, len(request.prompt) :].tolist()
