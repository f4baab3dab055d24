"""An update of more than one turn: more columns or tokens of a row than its lanes take at once; several programs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_kv import DecodeMetadata, KVLayout, decode_metadata, new_held, update_metadata
from tests.conftest import INTERPRETED, take_last_program_first, take_small_sizes
from tests.test_updates import Call, Rig, devices, follow, sequence_of

EXAMPLES = 15
# 11 rows have six groups of their own; of 24 programs each row then has three.
SMALL_TURNS = {"LANES": 1, "WIDE": 2, "TURNS": 1, "FEW": 2, "UPDATE_CHUNK": 4, "UPDATE_SCAN": 2}


@pytest.mark.skipif(not INTERPRETED, reason="compiled kernels have their sizes")
@pytest.mark.parametrize(("updaters", "group"), [(24, 2), (1, 4)], ids=["parts", "one-part"])
def test_any_sequence_in_small_turns_equals_the_oracle(
    updaters: int, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_small_sizes(monkeypatch, {**SMALL_TURNS, "UPDATERS": updaters, "GROUP": group})
    if updaters > 1:  # several programs a row; in the usual order they are tried in test_updates
        take_last_program_first(monkeypatch)

    @settings(max_examples=EXAMPLES)
    @given(st.binary(min_size=420, max_size=420).map(sequence_of))
    def equals_the_oracle(calls: list[Call]) -> None:
        follow(calls, "cpu")

    equals_the_oracle()


@devices
@pytest.mark.parametrize("mapped", [False, True], ids=["", "mapped"])
@pytest.mark.parametrize("parts", [1, 2])
def test_long_rows_join_among_short_ones_and_shrink(
    device: str, mapped: bool, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the sizes of a release: behind 1,040 columns a program, up to two rows are taken one after the other."""
    take_small_sizes(monkeypatch, {"UPDATERS": 2 * parts})
    layout = KVLayout(page_size=1, max_context_len=4_000, window=1_900)
    pool = torch.randint(0, 4_000, (4, 4_000), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    rig, least = Rig(layout, device, 3, mapped), 1_040 * parts
    for seq_lens, generations, slots in (
        ([4_000, 17, least + 1], [0, 0, 0], pool),
        ([4_000, 18, least + 2], [0, 0, 0], pool),
        ([3, 3_999, least + 3], [0, 1, 0], pool),
        ([3_990, 3_999, least + 4], [1, 2, 1], pool.flip(1)),  # other pages: what is skipped shows
        ([3_991, least + 50, 5], [1, 2, 1], pool.flip(1)),
    ):
        call = {
            "req_to_token": slots, "req_pool_indices": torch.tensor([2, 0, 3]), "seq_lens": torch.tensor(seq_lens),
            "generations": torch.tensor(generations), "layout": layout,
        }  # fmt: skip
        rig.step(call | ({"full_to_swa": torch.arange(4_000).flip(0)} if mapped else {}))


@devices
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("least", [16, 1_040], ids=["turn", "turns-side-by-side"])
def test_one_column_behind_what_a_row_takes_is_written(
    device: str, least: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_small_sizes(monkeypatch, {"UPDATERS": 2 * parts})
    layout = KVLayout(page_size=1, max_context_len=4_000)
    rig = Rig(layout, device, 1, mapped=False)
    for generation, columns in enumerate((least * parts + 1, least * parts, least * parts + 1)):
        rig.step({
            "req_to_token": torch.arange(4_000).flip(0)[None] + generation, "req_pool_indices": torch.tensor([0]),
            "seq_lens": torch.tensor([columns]), "generations": torch.tensor([generation]), "layout": layout,
        })  # fmt: skip


def test_a_window_may_pass_more_columns_than_are_new() -> None:
    layout = KVLayout(page_size=4, max_context_len=140, window=67)
    rig, pool = Rig(layout, "cpu", 1, mapped=True), torch.arange(4, 144)[None]
    for length in (69, 134):  # 17 columns are passed, 16 are new
        rig.step({
            "req_to_token": pool, "req_pool_indices": torch.tensor([0]), "seq_lens": torch.tensor([length]),
            "generations": torch.tensor([0]), "layout": layout, "q_len": 0, "full_to_swa": torch.arange(200),
        })  # fmt: skip


@pytest.mark.parametrize(
    ("length", "queries", "slots"),
    [
        (2**31 - 1, 2**31, [-1, 5, 5, 5]),
        (2**31 - 2, 2**31, [-1, -1, 5, 5]),
        (2**31 - 1, 2**62, [-1, -1, -1, -1]),
        (2**31 - 3, 2**31 - 1, [-1, -1, 5, 5]),
    ],
)
def test_queries_beyond_32_bits_lie_where_they_should(length: int, queries: int, slots: list[int]) -> None:
    """The last token is at position length - 1, so the first of the queries is ahead of the row's beginning."""
    layout = KVLayout(page_size=2**30, max_context_len=2**31 - 1)
    pool = torch.full((1, 1), 5).expand(2, 2**31 - 1)
    given = (pool, torch.tensor([0]), torch.tensor([length]))
    call = {"layout": layout, "q_len": torch.tensor([queries]), "num_tokens": 4}
    new = {"cache_seqlens": (1,), "cu_seqlens_q": (2,), "cu_seqlens_k": (2,), "page_table": (1, layout.max_num_pages)}
    out = DecodeMetadata(
        **{name: torch.zeros(shape, dtype=torch.int32) for name, shape in new.items()},
        slot_mapping=torch.zeros(4).long(),
    )
    held = new_held(layout, 1, "cpu")
    assert update_metadata(*given, torch.tensor([0]), held=held, out=out, **call).slot_mapping.tolist() == slots
    assert decode_metadata(*given, **call).slot_mapping.tolist() == slots
