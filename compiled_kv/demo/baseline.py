"""What the demo is held to: transformers' own `generate()`, one request at a time, its own cache, none of our code."""

from __future__ import annotations

from typing import Any

import torch

from .requests import Request


def generate(model: Any, request: Request) -> list[int]:
    """The greedy continuation of `request` in float32, without TF32."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    prompt = torch.tensor([request.prompt], device=model.device)
    tokens = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, use_cache=True,
        min_new_tokens=request.new_tokens, max_new_tokens=request.new_tokens,
    )  # fmt: skip
    return tokens[0, len(request.prompt) :].tolist()
