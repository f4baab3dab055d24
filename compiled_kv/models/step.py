"""The decode step of a transformers causal language model over a paged KV cache: what all architectures share.

    step = PagedLlama(LlamaForCausalLM(config), layout, max_reqs=8, num_pages=64)
    logits = torch.compile(step, fullgraph=True)(token_ids, req_pool_indices, seq_lens, num_reqs)

An architecture says what one token caches in a layer (`cached`) and how a layer attends (`attend`); the modules and
weights are the model's own. The step builds its metadata inside, in one launch, and reads no value back.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import compiled_kv as ckv

from .pools import PagedPool, visible_keys

FULL, SLIDING = "full_attention", "sliding_attention"

# No special tokens: a request of the demo ends when it has as many tokens as its trace says.
SMALL = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 32768, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    "tie_word_embeddings": False, "initializer_range": 0.3,
}  # fmt: skip


class Architecture(NamedTuple):
    """A paged step, the transformers model it serves, a small configuration of it, and the page size of its cache."""

    paged: type[PagedCausalLM]
    causal_lm: Any
    config: Any
    page_size: int = 16

    def build(self, seed: int = 0, device: str | torch.device = "cpu") -> Any:
        """The small model with random weights, float32, in eval mode."""
        torch.manual_seed(seed)
        return self.causal_lm(self.config).eval().to(device)

    def draft(self, model: Any) -> Any:
        """A draft for `model`: all of it but the last layer, in copies."""
        config = copy.deepcopy(model.config)
        config.num_hidden_layers -= 1
        config.layer_types = layer_types(config)
        draft = self.causal_lm(config).eval().to(model.device)
        draft.load_state_dict(model.state_dict(), strict=False)
        return draft


class View(NamedTuple):
    """What the layers of one attention type share in one step."""

    slots: Tensor  # [B, Q] where this step's tokens are written, -1 for none
    page_table: Tensor  # [B, P]
    mask: Tensor  # bool [B, 1, Q, K]
    rope: tuple[Tensor, Tensor]  # cos, sin [B, Q, D]


class PagedCausalLM(nn.Module):
    """A transformers causal language model whose cache is paged.

    Args:
        model: the transformers model, in eval mode; its weights are used as they are.
        layout: page size, longest context, draft tokens; `window` where layers slide.
        max_reqs: rows of `req_to_token`.
        num_pages: pages of the full-attention pools, the null page included.
        num_swa_pages: pages of the sliding-window pools, the null page included; 0 where no layer slides.

    Buffers: `req_to_token` int64 [max_reqs, max_seqlen_k], `full_to_swa` int64 [num_pages * page_size], and `status`
    int32 [1], which collects what metadata had to clamp.
    """

    req_to_token: Tensor
    full_to_swa: Tensor
    status: Tensor
    pools: Any  # nn.ModuleList of a list of PagedPool a layer

    def __init__(
        self, model: Any, layout: ckv.KVLayout, *, max_reqs: int, num_pages: int, num_swa_pages: int = 0
    ) -> None:
        super().__init__()
        self.model, self.layout = model.requires_grad_(False), layout
        self.layer_types = layer_types(model.config)
        like, pages = model.lm_head.weight, {FULL: num_pages, SLIDING: num_swa_pages}
        self.pools = nn.ModuleList(
            nn.ModuleList(
                PagedPool(pages[kind], layout.page_size, heads, dim, like) for heads, dim in self.cached(model.config)
            )
            for kind in self.layer_types
        )
        for name, shape, dtype in (
            ("req_to_token", (max_reqs, layout.max_seqlen_k), torch.int64),
            ("full_to_swa", (num_pages * layout.page_size,), torch.int64),
            ("status", (1,), torch.int32),
        ):
            self.register_buffer(name, torch.zeros(shape, dtype=dtype, device=like.device), persistent=False)

    def cached(self, config: Any) -> Sequence[tuple[int, int]]:
        """(heads, dim) of each tensor that one token caches in one layer."""
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return [(config.num_key_value_heads, dim)] * 2

    def attend(self, attn: Any, hidden: Tensor, view: View, pools: Sequence[PagedPool]) -> Tensor:
        """One layer's attention: [B, Q, hidden] -> [B, Q, hidden], writing this step's tokens to `pools` first."""
        raise NotImplementedError

    def layer(self, layer: Any, hidden: Tensor, view: View, pools: Sequence[PagedPool]) -> Tensor:
        """One decoder layer, residuals included."""
        hidden = hidden + self.attend(layer.self_attn, layer.input_layernorm(hidden), view, pools)
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))

    def rope(self, hidden: Tensor, positions: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        """cos and sin [B, Q, D] of `positions` [B, Q] for layers of this attention type."""
        return self.model.model.rotary_emb(hidden, positions)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of the hidden states after the last norm."""
        return self.model.lm_head(hidden)

    def forward(self, token_ids: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, num_reqs: Tensor,
                q_lens: Tensor | None = None, seq_len_delta: int = 0) -> Tensor:  # fmt: skip
        """One step over B rows of Q tokens.

        Args:
            token_ids: int64 [B, Q]; of a ragged row the first `q_lens[i]` count.
            req_pool_indices: int [B], the rows of `req_to_token`.
            seq_lens: int [B], committed tokens: with `seq_len_delta` they count the tokens of this step.
            num_reqs: int [1], rows in use; the others are padding.
            q_lens: int [B], the tokens of each row in a ragged step.

        Returns:
            float [B, Q, vocab]; [B, 1, vocab] in a ragged step, of each row's last token.
        """
        q_max = token_ids.shape[1]
        meta = ckv.decode_metadata(
            self.req_to_token, req_pool_indices, seq_lens, layout=self.layout, seq_len_delta=seq_len_delta,
            q_len=q_max if q_lens is None else q_lens, num_tokens=None if q_lens is None else token_ids.numel(),
            full_to_swa=self.full_to_swa if SLIDING in self.layer_types else None, num_reqs=num_reqs,
            status=self.status,
        )  # fmt: skip
        counts = meta.cu_seqlens_q.diff()
        query = torch.arange(q_max, device=token_ids.device)
        positions = (meta.cache_seqlens - counts)[:, None] + query
        hidden = self.model.model.embed_tokens(token_ids)
        views = {kind: self.view(kind, meta, hidden, positions) for kind in sorted(set(self.layer_types))}
        for kind, layer, pools in zip(self.layer_types, self.model.model.layers, self.pools):
            hidden = self.layer(layer, hidden, views[kind], pools)
        if q_lens is not None:
            last = (counts - 1).clamp(min=0).long()[:, None, None]
            hidden = hidden.gather(1, last.expand(-1, 1, hidden.shape[-1]))
        return self.head(self.model.model.norm(hidden))

    def view(self, kind: str, meta: ckv.DecodeMetadata, hidden: Tensor, positions: Tensor) -> View:
        """The part of the metadata that layers of this attention type need, by row."""
        full = meta.page_table, meta.slot_mapping, None
        sliding = meta.swa_page_table, meta.swa_slot_mapping, self.layout.window
        page_table, slots, window = sliding if kind == SLIDING else full
        assert page_table is not None and slots is not None
        mask = visible_keys(positions, page_table.shape[1] * self.layout.page_size, window)
        rope = self.rope(hidden, positions.clamp(min=0), kind)
        return View(by_row(slots, meta.cu_seqlens_q, positions.shape[1]), page_table, mask, rope)


def layer_types(config: Any) -> list[str]:
    """The attention type of each layer; a config that names none has full attention throughout."""
    kinds = getattr(config, "layer_types", None) or [FULL] * config.num_hidden_layers
    return list(kinds)[: config.num_hidden_layers]


def by_row(slots: Tensor, cu_seqlens_q: Tensor, q_max: int) -> Tensor:
    """`slots` [T], packed in the order of `cu_seqlens_q`, as [B, Q]: -1 beyond each row's own tokens."""
    query = torch.arange(q_max, device=slots.device)
    start, end = cu_seqlens_q[:-1, None], cu_seqlens_q[1:, None]
    token = (start + query).clamp(max=slots.shape[0] - 1)
    return torch.where(start + query < end, slots[token], -1)
