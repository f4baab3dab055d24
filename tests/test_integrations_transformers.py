"""transformers' own models over a paged cache: the tokens of `generate()`, whole steps, and errors in our words."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import compiled_kv as ckv
from compiled_kv.demo.baseline import generate, without_tf32
from compiled_kv.demo.decoding import PlainDecoder
from compiled_kv.demo.evidence import Compiled
from compiled_kv.demo.loop import Loop
from compiled_kv.demo.workload import Workload, make_requests, plan
from compiled_kv.integrations.transformers import NAME, DecodeStep, PagedCache, paged_attention, paged_mask
from compiled_kv.models import NAMES, architecture
from compiled_kv.models.step import SMALL
from compiled_kv.request_traces import Lengths
from tests.cases import needs_cuda

EVERYTHING = "COMPILED_KV_EXAMPLES" in os.environ
BACKEND = "inductor" if EVERYTHING else "eager"  # either way, dynamo makes the graph
CONTEXTS = 3, 90, 1, 40, 64, 17  # shorter and longer than a page, a chunk and Gemma's window of 24
GENERATED = 30, 12, 1, 60, 5, 20
LENGTHS = [Lengths(*pair) for pair in zip(CONTEXTS, GENERATED)]
PROMPT, NEW = 30, 40  # of the batches that generate() runs, over several pages and windows

# Beyond the four: capped scores, attention sinks, sliding layers alone, layer types made by the configuration, layers
# that read the keys of an earlier one, and queries scaled by their position, which each layer asks its cache for.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("Gemma2Config", {"head_dim": 16, "query_pre_attn_scalar": 16}),
    "gpt_oss": ("GptOssConfig", {"head_dim": 16, "num_local_experts": 4, "experts_implementation": "batched_mm"}),
    "mistral": ("MistralConfig", {}),
    "gemma3n": (
        "Gemma3nTextConfig",
        {
            "num_hidden_layers": 4, "num_kv_shared_layers": 2, "head_dim": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "intermediate_size": [128] * 4, "activation_sparsity_pattern": [0.0] * 4,
            "vocab_size_per_layer_input": 512, "hidden_size_per_layer_input": 8, "laurel_rank": 8,
            "altup_num_inputs": 2,
        },
    ),
    "llama4": (
        "Llama4TextConfig",
        {
            "layer_types": ["full_attention"] * 2, "no_rope_layers": [0, 0], "floor_scale": 8, "attn_scale": 0.5,
            "head_dim": 16, "intermediate_size_mlp": 128, "num_local_experts": 2, "pad_token_id": 0,
        },
    ),
    "qwen2": ("Qwen2Config", {"use_sliding_window": True, "max_window_layers": 1}),
}  # fmt: skip


def build(name: str) -> Any:
    """A small model with random weights and transformers' own attention."""
    if name in NAMES:
        arch = architecture(name)
        model = arch._replace(config=copy.deepcopy(arch.config)).build(seed=1)
        assert model.config._attn_implementation == "sdpa"  # what follows would compare our attention with itself
        return model
    config, settings = OTHERS[name]
    made = getattr(transformers, config)(**SMALL | {"num_hidden_layers": 2, "sliding_window": 24} | settings)
    torch.manual_seed(1)
    return transformers.AutoModelForCausalLM.from_config(made, attn_implementation="eager").eval()


def page_size(name: str) -> int:
    return architecture(name).page_size if name in NAMES else 16


def window(model: Any) -> int | None:
    return getattr(model.config, "sliding_window", None)


def paged(model: Any, size: int = 16, length: int = 128, max_reqs: int = 3, **pages: int) -> PagedCache:
    """A cache for `model`, which from now on attends through it."""
    model.set_attn_implementation(NAME)
    layout = ckv.KVLayout(size, length, window=window(model))
    return PagedCache(model, layout, max_reqs=max_reqs, **{"num_pages": 1 + max_reqs * layout.max_num_pages} | pages)


def continued(model: Any, prompt: Tensor, mask: Tensor, new: int = NEW, **options: Any) -> Tensor:
    """The greedy continuation of a batch."""
    return model.generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=new, **options)


def batch_of(rows: int, padding: int = 7) -> tuple[Tensor, Tensor]:
    """Prompts and their mask; the last is padded on the left."""
    prompt = torch.randint(512, (rows, PROMPT), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(prompt)
    mask[-1, :padding] = 0
    return prompt, mask


@pytest.mark.parametrize("name", [*NAMES, *OTHERS])
def test_generate_gives_the_tokens_that_it_gives_with_its_own_cache(name: str) -> None:
    model = build(name)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    prompt, mask = batch_of(2)
    want = continued(model, prompt, mask)
    cache = paged(model, page_size(name))
    assert torch.equal(continued(model, prompt, mask, past_key_values=cache), want)
    assert len(set(want[0, PROMPT:].tolist())) > 10, "a model that repeats itself would hide mistakes"
    assert cache.get_seq_length() == PROMPT + NEW - 1 and cache.state.status.item() == 0
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())


def test_a_conversation_goes_on_where_its_cache_ends() -> None:
    model = build("gemma3")
    prompt, mask = batch_of(2, padding=0)

    def turns(cache: Any) -> Tensor:
        first = continued(model, prompt, mask, 10, past_key_values=cache)
        second = torch.cat((first, prompt[:, :5]), dim=1)
        return continued(model, second, torch.ones_like(second), 10, past_key_values=cache)

    want = turns(transformers.DynamicCache(config=model.config))
    assert torch.equal(turns(paged(model)), want)


def test_after_reset_another_batch_takes_the_same_pages() -> None:
    model = build("gemma3")
    prompts = [batch_of(rows) for rows in (3, 1)]
    want = [continued(model, *each) for each in prompts]
    cache = paged(model)
    for each, tokens in zip(prompts, want):
        assert torch.equal(continued(model, *each, past_key_values=cache), tokens)
        cache.reset()
        assert cache.get_seq_length() == 0
        assert len(cache.allocator.full.free) == len(cache.allocator.swa.free) == 3 * 8
        assert len(cache.allocator.rows) == 3


def test_sliding_pages_behind_the_window_are_used_again() -> None:
    """Two pages of prompt, then never more than three: 24 tokens of window, and the one that is being filled."""
    model = build("gemma3")
    prompt, mask = batch_of(1, padding=0)
    want = continued(model, prompt, mask, 90)
    cache = paged(model, max_reqs=1, num_pages=9, num_swa_pages=4)
    assert torch.equal(continued(model, prompt, mask, 90, past_key_values=cache), want)
    assert cache.allocator.swa.taken == 8 and cache.state.status.item() == 0


def workload(name: str) -> Workload:
    """Six requests for three rows and 60 % of the pages that those would like to have."""
    arch = architecture(name)
    return plan(make_requests(LENGTHS, arch, seed=3), arch, batch=3, chunk=16, draft_tokens=0, pool=0.6)


def serve(name: str, device: str, backend: str) -> PlainDecoder:
    """Serve the workload in a loop of joining, evicted and leaving requests; the tokens are those of generate()."""
    without_tf32()
    model, work = build(name).to(device), workload(name)
    want = [generate(model, request) for request in work.requests]
    model.set_attn_implementation(NAME)
    cache = PagedCache(
        model, work.layout, max_reqs=2 * work.batch, num_pages=work.num_pages, num_swa_pages=work.num_swa_pages or None
    )
    step: Any = DecodeStep(model, cache)
    decoder = PlainDecoder(step, backend, batch=work.batch, chunk=work.chunk)
    loop = Loop(decoder, cache.allocator)
    assert loop.serve(work.requests) == want
    assert loop.preemptions >= 1 and cache.allocator.shared_pages >= 1 and cache.state.status.item() == 0
    for pools in cache.state.pools:
        assert not any(pool.data[: work.layout.page_size].any() for pool in pools), "the null page stays zero"
    return decoder


def check_whole(decoder: PlainDecoder) -> None:
    for step in decoder.steps:
        assert step.served > 1 and step.strays == {} and step.status == 0, step.name
        for part in step.parts:
            assert part.whole and (part.metadata_launches, part.host_reads) == (1, 0), step.name


@pytest.mark.parametrize("name", NAMES if EVERYTHING else ["gemma3"])
def test_served_through_one_graph_a_step_every_token_is_that_of_generate(name: str) -> None:
    check_whole(serve(name, "cpu", "eager"))


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("name", NAMES)
def test_on_a_cuda_device_every_token_is_that_of_generate(name: str) -> None:
    check_whole(serve(name, "cuda", "inductor"))


MODES = {"decode": (1, False, 0), "extend": (8, True, 0), "verify": (4, False, 4)}  # queries, ragged, delta


@pytest.mark.parametrize("name", [*NAMES, "gpt_oss"] if EVERYTHING else NAMES)
def test_the_auditor_finds_nothing_in_the_step(name: str) -> None:
    model = build(name)
    cache = paged(model, page_size(name), length=64)
    for mode, (q_max, ragged, delta) in MODES.items() if EVERYTHING else [("decode", MODES["decode"])]:
        step = DecodeStep(model, cache, seq_len_delta=delta)
        rows = torch.tensor([2, 0, 0])
        more = [torch.tensor([q_max, 2, 0])] if ragged else []
        report = ckv.audit(
            step, torch.zeros(3, q_max, dtype=torch.int64), rows, torch.tensor([50, 9, 0]), torch.tensor([2]), *more,
            target="cuda:sm_90",
        )  # fmt: skip
        assert report.ok and report.findings == () and report.is_whole, f"{mode}\n{report}"
        assert list((report.launches or {}).values()) == [1], mode


def test_a_verified_draft_gets_the_logits_of_the_plain_model() -> None:
    model = build("gemma3")
    tokens = torch.randint(512, (2, 60))
    with torch.no_grad():
        want = model(tokens).logits[:, 56:]
        cache = paged(model)
        model(tokens[:, :56], past_key_values=cache)
        rows = cache.reserve(2, 60)
        got = DecodeStep(model, cache, seq_len_delta=4)(tokens[:, 56:], rows, torch.tensor([56, 56]))
    torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", NAMES)
def test_a_compiled_step_follows_generate_in_the_same_cache(name: str) -> None:
    model = build(name)
    prompt, mask = batch_of(2, padding=0)
    want = continued(model, prompt, mask)
    cache = paged(model, page_size(name))
    tokens = continued(model, prompt, mask, 10, past_key_values=cache)
    rows, step = cache.reserve(2, PROMPT + NEW), Compiled("decode", DecodeStep(model, cache), BACKEND)
    for length in range(PROMPT + 10, PROMPT + NEW):
        logits = step(tokens[:, -1:], rows, torch.tensor([length, length], dtype=torch.int32))
        tokens = torch.cat((tokens, logits[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(tokens, want)
    assert step.whole and (step.metadata_launches, step.host_reads) == (1, 0) and step.calls == NEW - 10


def test_a_padding_row_writes_nothing_and_live_rows_one_slot_each() -> None:
    model = build("gemma3")
    cache = paged(model)
    rows = cache.reserve(3, 20)
    before = [pool.data.clone() for pools in cache.state.pools for pool in pools]
    step = DecodeStep(model, cache)
    logits = step(torch.tensor([[5], [6], [7]]), rows, torch.tensor([9, 17, 20]), torch.tensor([2]))
    assert logits.isfinite().all()
    slots = {cache.state.req_to_token[rows[0], 8].item(), cache.state.req_to_token[rows[1], 16].item()}
    for kind, pool, old in zip(
        [kind for kind in cache.state.layer_types for _ in range(2)],
        [pool for pools in cache.state.pools for pool in pools],
        before,
    ):
        wanted = slots if kind == "full_attention" else set(cache.state.full_to_swa[list(slots)].tolist())
        assert set((pool.data != old).flatten(1).any(1).nonzero().flatten().tolist()) == wanted


def encoder_decoder() -> Any:
    config = transformers.T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    return transformers.T5ForConditionalGeneration(config)


def recurrent() -> Any:
    config = transformers.Qwen3NextConfig(
        **SMALL | {"num_hidden_layers": 2}, layer_types=["linear_attention", "full_attention"], num_experts=4,
    )  # fmt: skip
    return transformers.Qwen3NextForCausalLM(config)


def rotating(kind: str, **settings: Any) -> Any:
    rope = {"rope_type": kind, "rope_theta": 1e4} | settings
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **SMALL | {"num_hidden_layers": 1, "max_position_embeddings": 72}, rope_parameters=rope
        )
    )


LONG = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 48}


def without_keys() -> Any:
    """The first layer keeps nothing."""
    model = build("llama")
    first = model.model.layers[0].self_attn
    forward = first.forward
    first.forward = lambda *args, **kwargs: forward(
        *args, **{name: value for name, value in kwargs.items() if name not in ("past_key_values", "cache")}
    )
    return model


def without_cache() -> Any:
    model = build("llama")

    def forward(input_ids: Tensor, past_key_values: Any = None, **kwargs: Any) -> None:
        raise ValueError("no cache of yours")

    model.forward = forward
    return model


LAYOUT = ckv.KVLayout(16, 64)
BAD_MODELS: dict[str, tuple[Callable[[], Any], Any, type[Exception], str]] = {
    "no-model": (lambda: torch.nn.Linear(1, 1), LAYOUT, TypeError, "model must be a transformers PreTrainedModel, got"),
    "encoder": (encoder_decoder, LAYOUT, ValueError, "model must be decoder-only, got the encoder-decoder T5"),
    "own-attention": (lambda: build("llama"), LAYOUT, ValueError, "through 'compiled_kv', got 'sdpa': call model"),
    "recurrent": (
        recurrent, LAYOUT, ValueError, "model must have full or sliding attention in every layer, got linear_attention",
    ),
    "bidirectional": (
        lambda: transformers.BertLMHeadModel(transformers.BertConfig(**SMALL)), LAYOUT, ValueError,
        r"model must be a decoder, got BertLMHeadModel with config.is_decoder=False",
    ),
    "attention-of-its-own": (
        lambda: transformers.BloomForCausalLM(transformers.BloomConfig(hidden_size=64, n_layer=1, n_head=4)),
        LAYOUT, ValueError, "through 'compiled_kv', got 'eager': BloomForCausalLM may have no other",
    ),
    "long-rotation": (
        lambda: rotating("longrope", **LONG), LAYOUT, ValueError,
        "layout must hold at most 48 tokens a row for a model with longrope rotation, got 64: beyond",
    ),
    "dynamic-rotation": (
        lambda: rotating("dynamic", factor=2.0), ckv.KVLayout(16, 80), ValueError,
        "layout must hold at most 72 tokens a row for a model with dynamic rotation, got 80: beyond, the longest row",
    ),
    "no-keys": (
        without_keys, LAYOUT, ValueError, r"cache keys and values in every layer, LlamaForCausalLM has none in \[0\]",
    ),
    "no-cache": (
        without_cache, LAYOUT, ValueError, "model must run over a Cache of transformers, LlamaForCausalLM does not: no",
    ),
    "no-layout": (lambda: build("llama"), 64, TypeError, "layout must be a KVLayout, got int"),
    "no-window": (
        lambda: build("gemma3"), LAYOUT, ValueError, "layout.window must be the model's sliding_window 24, got None",
    ),
    "window-of-none": (
        lambda: build("llama"), ckv.KVLayout(16, 64, window=8), ValueError,
        "layout.window must be None where no layer of the model slides, got 8",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_MODELS)
def test_a_model_that_cannot_be_served_is_refused(case: str) -> None:
    make, layout, error, text = BAD_MODELS[case]
    model = make()
    if case not in ("no-model", "encoder", "own-attention", "bidirectional", "attention-of-its-own", "no-layout"):
        model.set_attn_implementation(NAME)
    with pytest.raises(error, match=text):
        PagedCache(model, layout, max_reqs=2, num_pages=9)


@pytest.mark.parametrize("name, value", [("max_reqs", 0), ("num_pages", 0), ("num_swa_pages", 0), ("max_reqs", 2.0)])
def test_sizes_are_checked(name: str, value: Any) -> None:
    model = build("llama")
    model.set_attn_implementation(NAME)
    with pytest.raises((TypeError, ValueError), match=f"{name} must be"):
        PagedCache(model, LAYOUT, **{"max_reqs": 2, "num_pages": 9} | {name: value})


BAD_BATCHES: dict[str, tuple[int, int, str]] = {
    "too-many-rows": (4, 4, "batch_size must be at most 3, the free rows of the cache, got 4"),
    "too-long": (1, 80, r"lengths\[0\]=80 needs 5 pages, has 4 \(64 tokens\)"),
    "too-few-pages": (3, 40, "num_pages must leave 9 pages for 3 rows of 40 tokens, 8 are free"),
    "too-few-sliding-pages": (2, 40, "num_swa_pages must leave 6 pages for 2 rows of 40 tokens, 4 are free"),
}


@pytest.mark.parametrize("case", BAD_BATCHES)
def test_a_batch_that_does_not_fit_is_refused_before_anything_is_written(case: str) -> None:
    rows, length, text = BAD_BATCHES[case]
    model = build("gemma3")
    cache = paged(model, length=64, num_pages=9, num_swa_pages=5 if "sliding" in case else 9)
    with pytest.raises(ValueError, match=text):
        model(torch.zeros(rows, length, dtype=torch.int64), past_key_values=cache)
    assert not any(pool.data.any() for pools in cache.state.pools for pool in pools)
    assert len(cache.allocator.rows) == 3 and len(cache.allocator.full.free) == 8


def test_generate_beyond_the_layout_says_how_many_pages_it_needs() -> None:
    model = build("llama")
    cache = paged(model, length=PROMPT + 5)
    with pytest.raises(ValueError, match=r"lengths\[0\]=36 needs 3 pages, has 3 \(35 tokens\)"):
        continued(model, *batch_of(2), 10, past_key_values=cache)


def test_another_batch_size_beams_and_drafts_are_refused() -> None:
    model = build("llama")
    cache = paged(model)
    cache.reserve(2, 5)
    with pytest.raises(ValueError, match=r"batch_size must be 2 until reset\(\), got 1"):
        cache.reserve(1, 5)
    cache.reset()
    with pytest.raises(NotImplementedError, match="neither beams nor drafts"):
        continued(model, *batch_of(1), 4, num_beams=2, past_key_values=cache)


def test_a_step_needs_the_cache_and_the_attention() -> None:
    model = build("llama")
    cache = paged(model)
    with pytest.raises(TypeError, match="cache must be a PagedCache, got DynamicCache"):
        DecodeStep(model, transformers.DynamicCache())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seq_len_delta must be at least 0, got -1"):
        DecodeStep(model, cache, seq_len_delta=-1)
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="attend through 'compiled_kv', got 'sdpa'"):
        DecodeStep(model, cache)
    other = build("gemma3")
    paged(other)
    with pytest.raises(ValueError, match=r"layout\.window must be the model's sliding_window 24, got None"):
        DecodeStep(other, cache)
    deeper = build("deepseek_v3")
    deeper.config.num_hidden_layers = 1
    deeper.set_attn_implementation(NAME)
    with pytest.raises(ValueError, match="model must be the one that cache was made for, got another DeepseekV3ForC"):
        DecodeStep(deeper, cache)


def test_a_cache_of_another_model_is_refused_before_it_takes_a_page() -> None:
    model, prompt = build("llama"), batch_of(1)[0]
    cache = paged(model)
    keys = torch.zeros(1, *(cache.state.pools[0][0].data.shape[i] for i in (1, 0, 2)))[:, :, :3]
    shape = r"value_states must be \[B, heads, Q, dim\] with B=1, heads=\d, .*dim=\d+, got"
    for key, value, error, text in [
        (keys.bfloat16(), keys, TypeError, "key_states must be float32, got bfloat16"),
        (keys, keys[:, :1], ValueError, shape),
        (keys, keys[..., 1:], ValueError, shape),
    ]:
        with pytest.raises(error, match=text):
            cache.update(key, value, 0)
    with pytest.raises(ValueError, match=r"layer_idx must be at most \d, the cache's last, got 99"):
        cache.update(keys, keys, 99)
    model.bfloat16()  # behind the cache's back
    with pytest.raises(TypeError, match="key_states must be float32, got bfloat16"):
        model(prompt, past_key_values=cache)
    assert not cache.holdings and not any(pool.data.any() for pools in cache.state.pools for pool in pools)


def test_a_pass_that_ended_midway_is_not_gone_on_from() -> None:
    """Layers behind the one that raised lack its tokens: what follows would attend to keys that nobody wrote."""
    model = build("llama")
    prompt, cache = batch_of(2)[0], paged(model)
    model(prompt[:, :5], past_key_values=cache)

    def once(*_: Any) -> None:
        hook.remove()
        raise RuntimeError("boom")

    hook = model.model.layers[1].register_forward_pre_hook(once)
    with pytest.raises(RuntimeError, match="boom"):
        model(prompt[:, 5:9], past_key_values=cache)
    with pytest.raises(
        ValueError, match=r"pass before must have ended, got layers of \[9, 5[, 5]*\] tokens: call reset"
    ):
        model(prompt[:, 5:9], past_key_values=cache)
    cache.reset()
    model(prompt[:, :9], past_key_values=cache)
    assert cache.get_seq_length() == 9


BAD_STEPS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "flat-tokens": ({"token_ids": torch.zeros(2, dtype=torch.int64)}, ValueError, r"token_ids must be \[B, Q\], got"),
    "tokens-in-a-list": ({"token_ids": [[1], [2]]}, TypeError, "token_ids must be a tensor, got list"),
    "tokens-of-floats": ({"token_ids": torch.zeros(2, 1)}, TypeError, "token_ids must be int32 or int64, got float32"),
    "rows-of-another-batch": ({"req_pool_indices": torch.zeros(3).long()}, ValueError, "req_pool_indices must be"),
    "one-count-for-all": ({"q_lens": 1}, TypeError, "q_lens must be a tensor, got int"),
}


@pytest.mark.parametrize("case", BAD_STEPS)
def test_a_step_names_what_it_refuses_before_anything_is_written(case: str) -> None:
    changes, error, text = BAD_STEPS[case]
    model = build("llama")
    cache = paged(model)
    given = {
        "token_ids": torch.ones(2, 1).long(),
        "req_pool_indices": cache.reserve(2, 4),
        "seq_lens": torch.ones(2).int(),
    }
    with pytest.raises(error, match=f"^{text}"):
        DecodeStep(model, cache)(**given | changes)
    assert not any(pool.data.any() for pools in cache.state.pools for pool in pools)


UNEQUAL: dict[str, tuple[Callable[[], Any], str]] = {
    "positions-of-its-own": (
        lambda: transformers.BartForCausalLM(
            transformers.BartConfig(**SMALL, d_model=64, decoder_layers=1, is_decoder=True, is_encoder_decoder=False)
        ),
        "model must take position_ids, for rows differ in length: BartForCausalLM counts its own",
    ),
    "scaled-by-position": (
        lambda: build("llama4"), "model must scale no queries by position: Llama4ForCausalLM counts its own, as if all",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNEQUAL)
def test_a_model_whose_rows_are_alike_has_no_decode_step(case: str) -> None:
    """`generate()` serves it; in a step it would take every row for as long as another."""
    make, text = UNEQUAL[case]
    model = make()
    model.set_attn_implementation(NAME)
    layout = ckv.KVLayout(16, 64, window=window(model))
    cache = PagedCache(model, layout, max_reqs=2, num_pages=9)
    with pytest.raises(ValueError, match=text):
        DecodeStep(model, cache)


def test_the_mask_follows_each_row() -> None:
    seen = paged_mask(2, 2, 5, q_offset=torch.tensor([2, -1]))
    assert seen.int().tolist() == [[[[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]]], [[[1, 0, 0, 0, 0], [1, 0, 0, 0, 0]]]]


def test_the_mask_hides_padding_and_keys_before_the_first() -> None:
    real = torch.tensor([[False, True, True]])
    assert paged_mask(1, 1, 4, q_offset=2, attention_mask=real).int().tolist() == [[[[0, 1, 1, 0]]]]
    assert paged_mask(1, 1, 2, q_offset=2, kv_offset=1, attention_mask=real).int().tolist() == [[[[1, 1]]]]
    assert paged_mask(1, 1, 2, q_offset=1, kv_offset=1).int().tolist() == [[[[1, 0]]]]


BAD_ATTENTION: dict[str, tuple[dict[str, Any], str]] = {
    "dropout": ({"dropout": 0.1}, r"dropout must be 0 over a cache, got 0.1: call model.eval\(\)"),
    "bias": ({"position_bias": torch.zeros(1)}, "position_bias must be None, got a tensor: Identity"),
    "sinks": ({"sinks": torch.zeros(2)}, "sinks must be None, got a tensor: Identity has no paged attention"),
    "foreign-mask": (
        {"attention_mask": torch.zeros(1, 1, 1, 3)},
        "attention_mask must have a column for each of 1 cached keys, got 3 in Identity",
    ),
    "no-mask": ({"attention_mask": None}, "attention_mask must be given in causal attention, got None in Identity"),
}


@pytest.mark.parametrize("case", BAD_ATTENTION)
def test_attention_refuses_what_it_does_not_compute(case: str) -> None:
    given, text = BAD_ATTENTION[case]
    states = torch.zeros(1, 2, 1, 4)
    with pytest.raises(ValueError, match=text):
        paged_attention(
            torch.nn.Identity(), states, states, states, **{"attention_mask": states[..., :1].bool()} | given
        )


def test_a_mask_of_single_indices_is_refused() -> None:
    with pytest.raises(ValueError, match="use_vmap must be False"):
        paged_mask(1, 1, 4, use_vmap=True)
