"""Planted faults: each changes tokens, so the comparison with the reference would see a mistake of its kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import compiled_kv as ckv
from compiled_kv.batches import DecodeBatch
from compiled_kv.buffers import DecodeBuffers
from compiled_kv.demo import decoding, serving
from compiled_kv.demo.loop import Loop
from compiled_kv.demo.requests import Request
from compiled_kv.demo.workload import Workload, make_requests, plan
from compiled_kv.models import architecture
from compiled_kv.models.allocator import Allocator, Holding
from compiled_kv.models.state import SLIDING
from compiled_kv.models.step import PagedCausalLM, View
from compiled_kv.request_traces import Lengths

Plant = Callable[[pytest.MonkeyPatch], None]
GOOD = {"view": PagedCausalLM.view}


def changed_view(change: Callable[[View], View], kind: str | None = None) -> Plant:
    """A fault in what the layers (of one attention type) see of the step."""

    def view(self: PagedCausalLM, of: str, *args: Any) -> View:
        good = GOOD["view"](self, of, *args)
        return change(good) if kind in (None, of) else good

    return lambda patch: patch.setattr(PagedCausalLM, "view", view)


def swapped_page(view: View) -> View:
    """The first two rows exchange the first page they read."""
    first = view.page_table[:, 0]
    exchanged = torch.cat((first[:2].flip(0), first[2:]))[:, None]
    return view._replace(page_table=torch.cat((exchanged, view.page_table[:, 1:]), dim=1))


def slot_before(view: View) -> View:
    """Each token is written one slot before its own."""
    return view._replace(slots=torch.where(view.slots > 0, view.slots - 1, view.slots))


def shorter_by_one(patch: pytest.MonkeyPatch) -> None:
    good = decoding.batch_of

    def batch_of(runs: Any, seq_lens: Sequence[int], tokens: Any) -> DecodeBatch:
        return good(runs, [length - 1 for length in seq_lens], tokens)

    patch.setattr(decoding, "batch_of", batch_of)


def wider_window(patch: pytest.MonkeyPatch) -> None:
    def view(self: PagedCausalLM, *args: Any) -> View:
        layout = self.layout
        assert layout.window is not None
        self.layout = ckv.KVLayout(layout.page_size, layout.max_context_len, layout.max_draft_tokens, layout.window + 1)
        good = GOOD["view"](self, *args)
        self.layout = layout
        return good

    patch.setattr(PagedCausalLM, "view", view)


def stale_sliding_id(patch: pytest.MonkeyPatch) -> None:
    """A sliding page goes back while its window still needs it, and `full_to_swa` goes on naming it."""

    def slide(self: Allocator, holding: Holding, length: int) -> None:
        for page in holding.pages[holding.first_swa : length // self.page_size]:
            if self.swa.release(self.swa_of[page]):
                del self.swa_of[page]
        holding.first_swa = length // self.page_size

    patch.setattr(Allocator, "slide", slide)


def forgotten_rollback(patch: pytest.MonkeyPatch) -> None:
    """The cache is taken to hold every token that was verified, accepted or not."""

    def decode(self: Loop) -> None:
        runs = self.make_room([(run, self.decoder.lookahead) for run in self.running if run.pending == 1])
        for run, tokens in zip(runs, self.decoder.decode(runs) if runs else ()):
            run.cached += self.decoder.lookahead
            self.settle(run, tokens)
            run.tokens += [0] * max(run.cached + 1 - len(run.tokens), 0)

    patch.setattr(Loop, "decode", decode)


def verify_too_far(patch: pytest.MonkeyPatch) -> None:
    shift_delta(patch, lambda buffers, stage: buffers.seq_len_delta > 0 and not stage)


def draft_too_far(patch: pytest.MonkeyPatch) -> None:
    shift_delta(patch, lambda buffers, stage: "q_len" in stage and "seq_lens" not in stage)


def shift_delta(patch: pytest.MonkeyPatch, meant: Callable[[DecodeBuffers, dict[str, Any]], bool]) -> None:
    """One token too many is added to the lengths of the stage that is meant."""

    class Shifted(DecodeBuffers):
        def metadata(self, batch_size: int, seq_len_delta: int | None = None, **stage: Any) -> Any:
            delta = self.seq_len_delta if seq_len_delta is None else seq_len_delta
            return super().metadata(batch_size, delta + meant(self, stage), **stage)

    patch.setattr(decoding, "DecodeBuffers", Shifted)


def one_generation(patch: pytest.MonkeyPatch) -> None:
    """A row is given to another request under the generation that it had."""
    good = Allocator.admit

    def admit(self: Allocator, tokens: Sequence[int]) -> tuple[Holding, int] | None:
        admitted = good(self, tokens)
        if admitted is not None:
            admitted[0].generation = 1
        return admitted

    patch.setattr(Allocator, "admit", admit)


def work_for(name: str, draft_tokens: int) -> Workload:
    """Seven requests without a common prefix, for four rows and 45 % of their pages, each longer than two windows at
    last."""
    arch = architecture(name)
    requests = make_requests([Lengths(20 + i, 32) for i in range(7)], arch, seed=5)
    own = [Request(request.prompt[-(20 + i) :], request.new_tokens) for i, request in enumerate(requests)]
    return plan(own, arch, batch=4, chunk=16, draft_tokens=draft_tokens, pool=0.45)


def tokens_of(name: str, draft_tokens: int = 0) -> tuple[list[list[int]], int]:
    """What the loop serves, and how many drafts were right; without a compiler, which a fault does not need."""
    arch, work = architecture(name), work_for(name, draft_tokens)
    model = arch.build(seed=5)
    draft = work.paged(arch, arch.draft(model)) if draft_tokens else None
    result = serving.run(name, work.paged(arch, model), work, None, lambda what, count: None, draft)
    return result.served, result.drafts_accepted


@pytest.fixture(scope="module")
def good() -> Callable[[str, int], tuple[list[list[int]], int]]:
    """What is served where nothing is planted, once a model and kind of decoding."""
    known: dict[tuple[str, int], tuple[list[list[int]], int]] = {}

    def served(name: str, draft_tokens: int) -> tuple[list[list[int]], int]:
        if (name, draft_tokens) not in known:
            known[name, draft_tokens] = tokens_of(name, draft_tokens)
        return known[name, draft_tokens]

    return served


FAULTS: dict[str, tuple[str, int, Plant]] = {
    "one-page-swapped": ("llama", 0, changed_view(swapped_page)),
    "one-length-short": ("llama", 0, shorter_by_one),
    "one-slot-before": ("llama", 0, changed_view(slot_before)),
    "one-latent-page-swapped": ("deepseek_v3", 0, changed_view(swapped_page)),
    "one-sliding-page-swapped": ("gemma3", 0, changed_view(swapped_page, SLIDING)),
    "window-off-by-one": ("gemma3", 0, wider_window),
    "generation-never-raised": ("llama", 0, one_generation),
    "stale-sliding-id": ("gemma3", 0, stale_sliding_id),
    "verify-delta-off-by-one": ("llama", 4, verify_too_far),
    "rollback-forgotten": ("llama", 4, forgotten_rollback),
}


@pytest.mark.parametrize(("name", "draft_tokens", "plant"), FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_changes_tokens(
    name: str, draft_tokens: int, plant: Plant, good: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, _ = good(name, draft_tokens)
    plant(monkeypatch)
    assert tokens_of(name, draft_tokens)[0] != served


def test_a_draft_delta_off_by_one_changes_the_drafts_but_not_the_output(
    good: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, accepted = good("llama", 4)
    draft_too_far(monkeypatch)
    changed, still_accepted = tokens_of("llama", 4)
    assert still_accepted < accepted
    assert changed == served


def test_without_a_fault_speculative_and_plain_decoding_agree(good: Any) -> None:
    assert good("llama", 4)[0] == good("llama", 0)[0]
