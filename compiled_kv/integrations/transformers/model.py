"""What a model must be for a paged cache, and what it caches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import compiled_kv as ckv
from compiled_kv.checks import check_layout
from compiled_kv.integrations.transformers.attention import NAME
from compiled_kv.models.state import FULL, SLIDING


def check_model(model: Any, layout: ckv.KVLayout) -> list[str]:
    """The attention type of each layer of a model that a paged cache of this layout can serve.

    Raises:
        TypeError: it is no transformers model, or the layout no KVLayout.
        ValueError: it has an encoder or is one, attends through something else, has layers of another kind, or a window
            that is not the layout's.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers PreTrainedModel, got {type(model).__name__}")
    check_layout(layout)
    if model.config.is_encoder_decoder:
        raise ValueError(f"model must be decoder-only, got the encoder-decoder {type(model).__name__}")
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "is_decoder", True) is False:
        raise ValueError(f"model must be a decoder, got {type(model).__name__} with config.is_decoder=False")
    if config._attn_implementation != NAME:
        way = f"call model.set_attn_implementation({NAME!r})"
        if not model._supports_attention_backend:
            way = f"{type(model).__name__} may have no other"
        raise ValueError(f"model must attend through {NAME!r}, got {config._attn_implementation!r}: {way}")
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or [FULL if window is None else SLIDING] * config.num_hidden_layers
    if unknown := sorted(set(kinds) - {FULL, SLIDING}):
        raise ValueError(f"model must have full or sliding attention in every layer, got {', '.join(unknown)}")
    if SLIDING in kinds and layout.window != window:
        raise ValueError(f"layout.window must be the model's sliding_window {window}, got {layout.window}")
    if SLIDING not in kinds and layout.window not in (None, window):
        raise ValueError(f"layout.window must be None where no layer of the model slides, got {layout.window}")
    return list(kinds)


def observe(model: Any) -> tuple[list[list[tuple[int, int]]], Tensor]:
    """(heads, dim) of the two tensors that each layer caches, and one of them, seen as one token passes."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    with torch.no_grad():
        model(input_ids=token, past_key_values=cache, use_cache=True)
    cached = [[(t.shape[1], t.shape[-1]) for t in (layer.keys, layer.values)] for layer in cache.layers]
    return cached, cache.layers[0].keys
