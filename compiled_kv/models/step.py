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
from torch import Tensor

import compiled_kv as ckv
from compiled_kv.models.pools import PagedPool, visible_keys
from compiled_kv.models.state import FULL, SLIDING, Batch, PagedState, Place, of_last_token

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


class PagedCausalLM(PagedState):
    """A transformers causal language model whose cache is paged.

    Args:
        model: the transformers model, in eval mode; its weights are used as they are.
        layout, max_reqs, num_pages, num_swa_pages: as in `PagedState`, whose buffers it has.
    """

    def __init__(
        self, model: Any, layout: ckv.KVLayout, *, max_reqs: int, num_pages: int, num_swa_pages: int = 0
    ) -> None:
        kinds, cached = layer_types(model.config), self.cached(model.config)
        super().__init__(
            layout, kinds, [cached] * len(kinds), model.lm_head.weight, max_reqs=max_reqs, num_pages=num_pages,
            num_swa_pages=num_swa_pages,
        )  # fmt: skip
        self.model = model.requires_grad_(False)

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
            seq_lens: int [B], committed tokens; `seq_lens + seq_len_delta` counts those of this step.
            num_reqs: int [1], rows in use; the others are padding.
            q_lens: int [B], the tokens of each row in a ragged step.

        Returns:
            float [B, Q, vocab]; [B, 1, vocab] in a ragged step, of each row's last token.
        """
        batch = self.batch(token_ids.shape[1], req_pool_indices, seq_lens, num_reqs, q_lens, seq_len_delta)
        return self.logits(token_ids, batch, ragged=q_lens is not None)

    def logits(self, token_ids: Tensor, batch: Batch, ragged: bool = False) -> Tensor:
        """The step over a batch whose places are known, as `forward` returns it."""
        hidden = self.model.model.embed_tokens(token_ids)
        views = {kind: self.view(kind, place, hidden, batch.positions) for kind, place in batch.places.items()}
        for kind, layer, pools in zip(self.layer_types, self.model.model.layers, self.pools):
            hidden = self.layer(layer, hidden, views[kind], pools)
        if ragged:
            hidden = of_last_token(hidden, batch.counts)
        return self.head(self.model.model.norm(hidden))

    def view(self, kind: str, place: Place, hidden: Tensor, positions: Tensor) -> View:
        """`place`, with the mask and the rotation of layers of this attention type."""
        window = self.layout.window if kind == SLIDING else None
        mask = visible_keys(positions, place.page_table.shape[1] * self.layout.page_size, window)
        return View(*place, mask, self.rope(hidden, positions.clamp(min=0), kind))


def layer_types(config: Any) -> list[str]:
    """The attention type of each layer; a config that names none has full attention throughout."""
    kinds = getattr(config, "layer_types", None) or [FULL] * config.num_hidden_layers
    return list(kinds)[: config.num_hidden_layers]
