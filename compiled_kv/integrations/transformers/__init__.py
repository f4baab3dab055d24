"""Any causal model of transformers over a paged cache: through its own `Cache`, attention and mask interfaces.

    model.set_attn_implementation("compiled_kv")                       # a name that importing this package registers
    cache = PagedCache(model, layout, max_reqs=4, num_pages=64)
    tokens = model.generate(prompt, past_key_values=cache)

    step = torch.compile(DecodeStep(model, cache), fullgraph=True)     # rows of any length, for continuous batching
    logits = step(token_ids, req_pool_indices, seq_lens, num_reqs)

The model's code and weights stay as they are. Needs transformers. docs/integrations/transformers.md has the whole.
"""

from compiled_kv.integrations.transformers.attention import NAME, paged_attention, paged_mask
from compiled_kv.integrations.transformers.cache import PagedCache
from compiled_kv.integrations.transformers.step import DecodeStep

__all__ = ["NAME", "DecodeStep", "PagedCache", "paged_attention", "paged_mask"]
