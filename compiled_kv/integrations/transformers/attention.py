"""The attention and the mask that transformers finds under the name "compiled_kv".

Both are what transformers' interfaces ask for, and know no cache. The mask takes the tokens before this step as one
number or as one for each row, which no mask of transformers' own does:

    rows hold 5 and 2 tokens, one query each, 8 keys      -> keys 0 to 5 and 0 to 2 are seen
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, prepare_padding_mask

from compiled_kv.models.pools import attention

NAME = "compiled_kv"
# What some models hand to their attention that would change its result.
UNSERVED = ("position_bias", "sinks", "indices", "block_indices")


def paged_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    scaling: float | None = None, dropout: float = 0.0, softcap: float | None = None, s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention over the keys of the cache: query [B, H, Q, D], key and value [B, H_kv, K, D] -> [B, Q, H, D_value].

    Args:
        attention_mask: bool [B, 1, Q, K]; None, where every key is seen, for an encoder's modules alone.
        softcap: bound of the scores.
        s_aux: [H], the logit of a key that every query sees and that has no value.

    Raises:
        ValueError: dropout, a position bias, no mask in causal attention, or one that is not the cache's.
    """
    if dropout:
        raise ValueError(f"dropout must be 0 over a cache, got {dropout}: call model.eval()")
    for name in UNSERVED:
        if kwargs.get(name) is not None:
            raise ValueError(f"{name} must be None, got a tensor: {type(module).__name__} has no paged attention")
    if attention_mask is None and getattr(module, "is_causal", True):
        raise ValueError(f"attention_mask must be given in causal attention, got None in {type(module).__name__}")
    if attention_mask is not None and attention_mask.shape[-1] != key.shape[2]:
        given = f"{attention_mask.shape[-1]} in {type(module).__name__}"
        raise ValueError(f"attention_mask must have a column for each of {key.shape[2]} cached keys, got {given}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if softcap is None and s_aux is None:
        out = attention(query, key, value, attention_mask, scale)
    else:
        out = _shaped_attention(query, key, value, attention_mask, scale, softcap, s_aux)
    return out.unflatten(-1, (query.shape[1], -1)), None


def _shaped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, cap: float | None,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """`attention` whose scores are capped, or that has sinks, which PyTorch's own cannot express."""
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], dim=1) for t in (key, value))
    scores = query @ key.transpose(2, 3) * scale
    if cap is not None:
        scores = (scores / cap).tanh() * cap
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is not None:
        scores = torch.cat((scores, sinks[None, :, None, None].expand(*scores.shape[:-1], 1)), dim=-1)
    weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2).flatten(2)


def paged_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: int | Tensor = 0, kv_offset: int = 0,
    mask_function: Callable[..., Tensor] = causal_mask_function, attention_mask: Tensor | None = None,
    use_vmap: bool = False, device: torch.device | str = "cpu", **kwargs: Any,
) -> Tensor:  # fmt: skip
    """Which keys each query sees: bool [B, 1, Q, K].

    Args:
        q_offset: tokens before this step, of every row or int [B]; a query before position 0 counts as at position 0.
        mask_function: transformers' own for the layer: causal, within a window, within a chunk.
        attention_mask: bool [B, L], tokens that are no padding; L tokens are in the cache after this step.

    Raises:
        ValueError: a mask function that takes single indices.
    """
    if use_vmap:
        raise ValueError(
            "use_vmap must be False: masks joined from functions of single indices, of image blocks say, are not served"
        )
    start = q_offset.view(-1, 1) if isinstance(q_offset, Tensor) else q_offset
    query = torch.arange(q_length, device=device)[None] + start
    row = torch.arange(batch_size, device=device)[:, None, None, None]
    key = torch.arange(kv_length, device=device) + kv_offset
    seen = mask_function(row, torch.zeros_like(row), query.clamp(min=0)[:, None, :, None], key)
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None:
        seen = seen & padding[:, None, None, kv_offset : kv_offset + kv_length]
    return seen.expand(batch_size, 1, q_length, kv_length)


AttentionInterface.register(NAME, paged_attention)
AttentionMaskInterface.register(NAME, paged_mask)
