"""What a model must be for a paged cache and for a decode step over one, and what it caches."""

from __future__ import annotations

import inspect
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
        ValueError: it has an encoder or is one, attends through something else, has layers of another kind, a window
            that is not the layout's, or a rotation that is not each row's own.
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
    _check_rotation(config, layout)
    return list(kinds)


def _check_rotation(config: Any, layout: ckv.KVLayout) -> None:
    """Refuse frequencies that follow the longest row of a batch: a row's tokens would depend on who is beside it."""
    parameters = getattr(config, "rope_parameters", None) or {}
    each = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
    for rope in each:  # one, or one for each kind of layer
        kind = rope.get("rope_type") or "default"
        if "dynamic" not in kind and kind != "longrope":
            continue
        bound = config.max_position_embeddings
        if kind == "longrope":
            bound = rope.get("original_max_position_embeddings", bound)
        if layout.max_seqlen_k > bound:
            raise ValueError(
                f"layout must hold at most {bound} tokens a row for a model with {kind} rotation, got "
                f"{layout.max_seqlen_k}: beyond, the longest row of a batch would change the others' frequencies"
            )


def check_rows(model: Any) -> None:
    """Refuse a model that has no use for a position of each row's own.

    Raises:
        ValueError: it takes no positions, or scales queries by positions that it counts itself.
    """
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ValueError(
            f"model must take position_ids, for rows differ in length: {type(model).__name__} counts its own"
        )
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "attn_temperature_tuning", False) and not all(getattr(config, "no_rope_layers", None) or [1]):
        raise ValueError(
            f"model must scale no queries by position: {type(model).__name__} counts its own, as if all rows were alike"
        )


def cache_name(model: Any) -> str:
    """What `forward` calls its cache: `past_key_values` until transformers 5.40."""
    return "past_key_values" if "past_key_values" in inspect.signature(model.forward).parameters else "cache"


def observe(model: Any) -> tuple[list[list[tuple[int, int]]], Tensor]:
    """(heads, dim) of the two tensors that each layer caches, and one of them, seen as one token passes.

    Raises:
        ValueError: the model does not run over a cache, or one of its layers keeps nothing there.
    """
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    name = type(model).__name__
    try:
        with torch.no_grad():
            model(input_ids=token, **{cache_name(model): cache}, use_cache=True)
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"model must run over a Cache of transformers, {name} does not: {error}") from error
    layers: list[Any] = list(cache.layers)
    while layers and getattr(layers[-1], "keys", None) is None:
        layers.pop()  # the last ones may read what an earlier one keeps
    lacking = [index for index, layer in enumerate(layers) if getattr(layer, "keys", None) is None]
    if lacking or not layers:
        raise ValueError(f"model must cache keys and values in every layer, {name} has none in {lacking or 'any'}")
    return [[(t.shape[1], t.shape[-1]) for t in (layer.keys, layer.values)] for layer in layers], layers[0].keys
