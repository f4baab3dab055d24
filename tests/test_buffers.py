"""`DecodeBuffers` hold what was loaded, refuse what the host can see to be wrong, and move with their module."""

from __future__ import annotations

import copy
import io
import struct
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from compiled_kv import reference
from compiled_kv.batches import DecodeBatch
from compiled_kv.buffers import DecodeBuffers
from compiled_kv.layout import KVLayout
from compiled_kv.staging import HALF, Ring
from compiled_kv.tracing.graphs import capture
from tests.cases import DEVICES, needs_cuda, pool_of_pages
from tests.conftest import INTERPRETED

devices = pytest.mark.parametrize("device", DEVICES)
traces = pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be traced")
LAYOUT = KVLayout(page_size=4, max_context_len=24, max_draft_tokens=4, window=6)
POOL, _ = pool_of_pages(6, 7, 4)
MAP = torch.arange(4 * 50) % 90
BATCH = DecodeBatch(rows=[3, 1], seq_lens=[9, 5], generations=[1, 4], token_ids=[11, 12])
PLAIN: dict[str, Any] = {}
VERIFY: dict[str, Any] = {"q_len": 4, "seq_len_delta": 4, "full_to_swa": MAP}
RAGGED: dict[str, Any] = {"q_len": 3, "ragged": True, "pad_seqlen": 2}
GIVEN: dict[str, Any] = {"given_slots": True, "page_map": MAP}
MODES = {"plain": PLAIN, "verify": VERIFY, "ragged": RAGGED, "given": GIVEN}
BATCHES = {
    "plain": BATCH,
    "verify": BATCH._replace(token_ids=[1, 2, 3, 4, 5, 6, 7, 8]),
    "ragged": BATCH._replace(q_lens=[3, 1], token_ids=[1, 2, 3, 4]),
    "given": BATCH._replace(slots=[50, -1]),
}


def make(mode: str = "plain", device: str = "cpu", batch_size: int = 4, **changes: Any) -> DecodeBuffers:
    given = {**MODES[mode], **changes}
    moved = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in given.items()}
    return DecodeBuffers(LAYOUT, POOL.to(device), max_batch_size=batch_size, **moved)


def on(device: str, batch: DecodeBatch) -> DecodeBatch:
    """The same batch as tensors on a device."""
    return DecodeBatch(*(None if values is None else torch.tensor(values, device=device) for values in batch))


def oracle(mode: str, batch: DecodeBatch, size: int) -> reference.Metadata:
    """What the metadata of a bucket of `size` rows must be."""
    given, padding = MODES[mode], [0] * (size - len(batch.rows))
    call: dict[str, Any] = {"layout": LAYOUT, "num_reqs": torch.tensor(len(batch.rows))}
    call |= {name: given[name] for name in ("seq_len_delta", "full_to_swa", "page_map", "pad_seqlen") if name in given}
    call["q_len"] = torch.tensor([*batch.q_lens, *padding]) if batch.q_lens else given.get("q_len", 1)
    if batch.q_lens:
        call["num_tokens"] = size * given["q_len"]
    if batch.slots:
        call |= {"slots": torch.tensor([*batch.slots, *padding]), "num_tokens": size}
    rows, lengths = torch.tensor([*batch.rows, *padding]), torch.tensor([*batch.seq_lens, *padding])
    return reference.decode_metadata(POOL, rows, lengths, **call)[0]


@devices
@pytest.mark.parametrize("tensors", [False, True], ids=["ints", "tensors"])
@pytest.mark.parametrize("mode", MODES)
def test_metadata_of_a_loaded_batch(mode: str, tensors: bool, device: str) -> None:
    buffers = make(mode, device)
    buffers.inputs.fill_(77)
    assert buffers.load(on(device, BATCHES[mode]) if tensors else BATCHES[mode]) == 2
    for name, found, wanted in zip(
        reference.Metadata._fields, buffers.metadata(3), oracle(mode, BATCHES[mode], 3), strict=True
    ):
        assert (found is None) == (wanted is None), name
        if found is not None and wanted is not None:
            assert found.tolist() == wanted.tolist(), name


@devices
def test_a_row_of_the_pool_may_stand_in_a_batch_twice_and_a_live_row_may_be_empty(device: str) -> None:
    buffers = make(device=device)
    for lengths in ([5, 6, 0], [9, 5, 3], [0, 9, 0], [1, 1, 4], [1, 0, 9]):
        batch = DecodeBatch([3, 3, 1], lengths, [2, 2, 0])
        buffers.load(batch)
        for found, wanted in zip(buffers.metadata(4), oracle("plain", batch, 4), strict=True):
            assert found is None if wanted is None else found.tolist() == wanted.tolist(), lengths
        slots = [-1 if length == 0 else int(POOL[row, length - 1]) for row, length in zip(batch.rows, lengths)]
        assert buffers.slot_mapping.tolist() == [*slots, -1]


@devices
def test_what_is_not_loaded_is_padding(device: str) -> None:
    buffers = make(device=device)
    buffers.load(DecodeBatch([3, 1, 2, 5], [9, 5, 7, 8], [1, 4, 2, 2], token_ids=[11, 12, 13, 14]))
    for _ in range(2 * HALF):
        buffers.load(BATCH)
        assert buffers.num_reqs.tolist() == [2]
        assert buffers.req_pool_indices.tolist() == [3, 1, 0, 0]
        assert buffers.seq_lens.tolist() == [9, 5, 0, 0]
        assert buffers.generations.tolist() == [1, 4, 0, 0]
        assert buffers.token_ids.tolist() == [11, 12, 0, 0]


@devices
def test_tokens_on_the_device_are_left_alone(device: str) -> None:
    buffers = make(device=device)
    buffers.token_ids.copy_(torch.tensor([5, 6, 7, 8]))
    buffers.load(BATCH._replace(token_ids=None))
    assert buffers.token_ids.tolist() == [5, 6, 7, 8]
    assert buffers.seq_lens.tolist() == [9, 5, 0, 0]


@pytest.mark.parametrize("tensors", [False, True], ids=["ints", "tensors"])
def test_a_token_a_row_is_enough_for_a_step_that_drafts_the_others(tensors: bool) -> None:
    buffers = make("verify")
    for tokens in ([1, 2, 3, 4, 5, 6, 7, 8], [11, 12], [13, 14]):
        batch = BATCH._replace(token_ids=tokens)
        buffers.load(on("cpu", batch) if tensors else batch)
        assert buffers.token_ids.tolist() == tokens + [0] * (16 - len(tokens))


def test_tokens_of_a_ragged_batch_on_the_device_may_have_room_to_spare() -> None:
    """The host knows no more than how many there can be."""
    buffers = make("ragged")
    buffers.load(on("cpu", BATCHES["ragged"]._replace(token_ids=[1, 2, 3, 4, 0, 0])))
    assert buffers.token_ids.tolist() == [1, 2, 3, 4, *[0] * 8]


WRONG = {
    "too-many": ("plain", DecodeBatch([1] * 5, [1] * 5, [0] * 5),
     "batch.rows must hold at most max_batch_size=4 requests, got 5"),
    "too-long": ("plain", DecodeBatch([1, 2], [3, 29], [0, 0]), "lengths[1]=29 needs 8 pages, has 7 (28 tokens)"),
    "too-long-with-drafts": ("verify", DecodeBatch([1, 2], [3, 25], [0, 0]),
     "batch.seq_lens plus seq_len_delta=4: lengths[1]=29"),
    "negative-length": ("plain", DecodeBatch([1], [-1], [0]), "batch.seq_lens[0] must be at least 0, got -1"),
    "row-outside-the-pool": ("plain", DecodeBatch([1, 6], [3, 3], [0, 0]), "batch.rows[1] must be at most 5, got 6"),
    "negative-row": ("plain", DecodeBatch([-1], [3], [0]), "batch.rows[0] must be at least 0, got -1"),
    "few-lengths": ("plain", DecodeBatch([1, 2], [3], [0, 0]),
     "batch.seq_lens must have one entry for each of the 2 rows, got 1"),
    "few-generations": ("plain", DecodeBatch([1, 2], [3, 3], [0]),
     "batch.generations must have one entry for each of the 2 rows"),
    "no-queries": ("ragged", BATCH, "batch.q_lens must be given for these buffers, got none"),
    "queries": ("plain", BATCH._replace(q_lens=[1, 1]), "batch.q_lens must be None for these buffers, got some"),
    "many-queries": ("ragged", BATCH._replace(q_lens=[1, 4]), "batch.q_lens[1] must be at most 3, got 4"),
    "no-slots": ("given", BATCH, "batch.slots must be given for these buffers, got none"),
    "many-slots": ("given", BATCH._replace(slots=[1, 2, 3]), "batch.slots must have at most 2 entries, got 3"),
    "many-tokens": ("plain", BATCH._replace(token_ids=[1, 2, 3]), "batch.token_ids must have at most 2 entries, got 3"),
    "few-tokens": ("plain", BATCH._replace(token_ids=[1]),
     "batch.token_ids must have one entry for each of the 2 queries, got 1"),
    "no-tokens": ("plain", BATCH._replace(token_ids=[]),
     "batch.token_ids must have one entry for each of the 2 queries, got 0"),
    "a-row-without-tokens": ("verify", BATCH._replace(token_ids=[1, 2, 3, 4]),
     "batch.token_ids must have one entry for each of the 8 queries, or for each of the 2 rows, got 4"),
    "few-ragged-tokens": ("ragged", BATCHES["ragged"]._replace(token_ids=[1, 2]),
     "batch.token_ids must have one entry for each of the 4 queries, got 2"),
    "many-ragged-tokens": ("ragged", BATCHES["ragged"]._replace(token_ids=[1] * 5),
     "batch.token_ids must have at most 4 entries, got 5"),
    "few-token-tensors": ("verify", on("cpu", BATCHES["verify"]._replace(token_ids=[1] * 7)),
     "batch.token_ids must have one entry for each of the 8 queries, or for each of the 2 rows, got 7"),
    "many-ragged-token-tensors": ("ragged", on("cpu", BATCHES["ragged"]._replace(token_ids=[1] * 7)),
     "batch.token_ids must have at most 6 entries, got 7"),
    "mixed": ("plain", BATCH._replace(seq_lens=torch.tensor([3, 3])),
     "batch.seq_lens must hold Python ints, as batch.rows does"),
    "mixed-tensors": ("plain", on("cpu", BATCH)._replace(seq_lens=[3, 3]), "batch.seq_lens must be a tensor, got list"),
    "float-tensor": ("plain", on("cpu", BATCH)._replace(seq_lens=torch.ones(2)),
     "batch.seq_lens must be int32 or int64, got float32"),
    "tensor-on-meta": ("plain", on("meta", BATCH), "batch.rows must be on cpu, as the buffers is, got meta"),
    "float-generation": ("plain", BATCH._replace(generations=[1, 0.5]),
     "batch.generations[1] must be an int, got float"),
    "wide-token": ("plain", BATCH._replace(token_ids=[2**63, 1]),
     "batch.token_ids[0] must be at most 9223372036854775807"),
    "no-generations": ("plain", BATCH._replace(generations=None), "batch.generations must have one entry for each row"),
    "no-generation-tensor": ("plain", on("cpu", BATCH)._replace(generations=None), "batch.generations must have one"),
    "no-lengths": ("plain", BATCH._replace(seq_lens=None), "batch.seq_lens must have one entry for each row, got None"),
    "no-rows": ("plain", BATCH._replace(rows=None), "batch.rows must have one entry for each row, got None"),
    "nothing": ("plain", DecodeBatch(None, None, None), "batch.rows must have one entry for each row, got None"),
    "a-number": ("plain", BATCH._replace(rows=3),
     "batch.rows must be a list, a tuple, or an array or tensor with a dimension, got int"),
    "a-number-of-tokens": ("plain", BATCH._replace(token_ids=3), "batch.token_ids must be a list, a tuple, or an arr"),
    "a-0-d-tensor": ("plain", BATCH._replace(rows=torch.tensor(3)), "batch.rows must be a list, a tuple, or an array"),
    "a-true-length": ("ragged", BATCH._replace(q_lens=[3, True]), "batch.q_lens[1] must be an int, got bool"),
    "a-true-row": ("plain", BATCH._replace(rows=[3, True]), "batch.rows[1] must be an int, got bool"),
    "a-false-row": ("plain", BATCH._replace(rows=(False, 3), seq_lens=(9, 5), generations=(1, 4), token_ids=None),
     "batch.rows[0] must be an int, got bool"),
    "a-true-seq-len": ("plain", BATCH._replace(seq_lens=[9, True]), "batch.seq_lens[1] must be an int, got bool"),
    "a-true-generation": ("plain", BATCH._replace(generations=[True, 4]),
     "batch.generations[0] must be an int, got bool"),
    "a-true-ragged-generation": ("ragged", BATCHES["ragged"]._replace(generations=[1, False]),
     "batch.generations[1] must be an int, got bool"),
    "a-true-slot": ("given", BATCH._replace(slots=[50, True]), "batch.slots[1] must be an int, got bool"),
    "a-true-token": ("plain", BATCH._replace(token_ids=[11, True]), "batch.token_ids[1] must be an int, got bool"),
    "an-array-of-bools": ("plain", BATCH._replace(generations=np.array([True, False])),
     "batch.generations[0] must be an int, got bool"),
    "a-tensor-of-bools": ("plain", on("cpu", BATCH)._replace(generations=torch.tensor([True, False])),
     "batch.generations must be int32 or int64, got bool"),
    "text": ("plain", DecodeBatch(["a"], [3], [0]), "batch.rows[0] must be an int, got str"),
}  # fmt: skip


@pytest.mark.parametrize(("mode", "batch", "message"), WRONG.values(), ids=WRONG.keys())
def test_bad_batch_is_refused_by_name_before_any_write(mode: str, batch: DecodeBatch, message: str) -> None:
    buffers = make(mode)
    buffers.inputs.fill_(77)
    with pytest.raises((TypeError, ValueError)) as caught:
        buffers.load(batch)
    assert message in str(caught.value)
    assert (buffers.inputs == 77).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_batch_size": 0}, "max_batch_size must be at least 1, got 0"),
        ({"q_len": 0}, "q_len must be at least 1, got 0"),
        ({"ragged": torch.ones(2)}, "ragged must be a bool, got Tensor"),
        ({"given_slots": 1}, "given_slots must be a bool, got int"),
        ({"seq_len_delta": -1}, "seq_len_delta must be at least 0, got -1"),
        ({"pad_seqlen": 29}, "pad_seqlen must be at most 28, got 29"),
        ({"full_to_swa": MAP, "page_map": MAP}, "at most one of full_to_swa and page_map may be given, got both"),
        ({"req_to_token": POOL[:, :20]}, "req_to_token must have at least 28 columns for this layout, got 20"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_sizes_are_refused(changes: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"req_to_token": POOL, "max_batch_size": 4, **changes}
    with pytest.raises((TypeError, ValueError), match=message):
        DecodeBuffers(LAYOUT, **given)


def test_settings_stay_as_the_buffers_were_made() -> None:
    buffers = DecodeBuffers(LAYOUT, POOL, max_batch_size=2)
    for name, value in {"seq_len_delta": 1, "layout": KVLayout(8, 16), "max_batch_size": 8, "pad_seqlen": 1}.items():
        before = getattr(buffers, name)
        with pytest.raises(AttributeError, match=f"^{name} stays as these buffers were made, "):
            setattr(buffers, name, value)
        assert getattr(buffers, name) == before


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        (([3], [6], [0]), TypeError, "batch must be a DecodeBatch, got tuple"),
        (None, TypeError, "batch must be a DecodeBatch, got NoneType"),
        (DecodeBatch({3, 1}, [6, 3], [0, 0]), TypeError, "batch.rows must be a list, a tuple, or an array"),  # type: ignore[arg-type]
        (DecodeBatch({3, 1}, {6, 3}, {0, 4}), TypeError, "batch.rows must be a list, a tuple, or an array"),  # type: ignore[arg-type]
        (DecodeBatch({3: 1}, [6], [0]), TypeError, "batch.rows must be a list, a tuple, or an array"),  # type: ignore[arg-type]
    ],
)
def test_what_has_no_order_is_no_batch(batch: Any, error: type[Exception], message: str) -> None:
    buffers = DecodeBuffers(LAYOUT, POOL, max_batch_size=2)
    with pytest.raises(error, match=message):
        buffers.load(batch)
    assert buffers.inputs.tolist() == [0] * len(buffers.inputs)


def test_a_layout_is_one() -> None:
    with pytest.raises(TypeError, match=r"^layout must be a KVLayout, got tuple$"):
        DecodeBuffers((4, 16), POOL, max_batch_size=2)  # type: ignore[arg-type]


def test_buffers_stay_out_of_the_state() -> None:
    model = nn.Sequential(nn.Linear(2, 2), make("verify"))
    assert list(model.state_dict()) == ["0.weight", "0.bias"]
    assert {"1.page_table", "1.inputs", "1.held", "1.req_to_token"} <= {name for name, _ in model.named_buffers()}


def test_a_float_cast_leaves_integers_alone() -> None:
    buffers = make().to(torch.float16)
    assert {t.dtype for t in buffers.buffers()} == {torch.int32, torch.int64}
    assert buffers.load(BATCH) == 2


@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda b: torch.load(_saved(b), weights_only=False)], ids=["copied", "pickled"]
)
def test_a_copy_is_a_set_of_its_own(clone: Any) -> None:
    buffers = make()
    buffers.load(BATCH)
    other = clone(buffers)
    other.load(DecodeBatch([5], [3], [0]))
    assert other.req_pool_indices.tolist() == [5, 0, 0, 0]
    assert buffers.req_pool_indices.tolist() == [3, 1, 0, 0]


def _saved(module: nn.Module) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return file


def test_reset_forgets_everything() -> None:
    buffers = make("verify")
    fresh = {name: t.clone() for name, t in buffers.named_buffers()}
    buffers.load(BATCHES["verify"])
    buffers.metadata(4)
    buffers.reset()
    assert all(torch.equal(fresh[name], t) for name, t in buffers.named_buffers())


@devices
@pytest.mark.parametrize(("taken_back", "generation"), [(1, 0), (2, 1)])
def test_pages_of_steps_taken_back_go_to_others(taken_back: int, generation: int, device: str) -> None:
    """Without a word where the step that had a token ahead of its own stays; else the generation is raised. The row
    of the batch where the steps were comes back when the request has grown again elsewhere."""
    pool = torch.full((2, 16), -1, device=device)
    pool[0, :8] = torch.arange(4, 12)  # pages 1 and 2
    pool[1, :4] = torch.arange(80, 84)
    buffers = DecodeBuffers(KVLayout(page_size=4, max_context_len=16), pool, max_batch_size=4)

    def tables(rows: list[int], lengths: list[int], generations: list[int]) -> list[list[int]]:
        buffers.load(DecodeBatch(rows, lengths, generations))
        return buffers.metadata(len(rows)).page_table.tolist()

    for length in (5, 6)[:taken_back]:  # 4 tokens ahead of the first step, 5 of the second
        assert tables([1, 1, 0], [1, 1, length], [0, 0, 0])[2] == [1, 2, 0, 0]
    pool[0, 4:8] = torch.arange(36, 40)  # page 9
    for length in (5, 6):
        assert tables([0], [length], [generation]) == [[1, 9, 0, 0]]
    assert tables([1, 1, 0], [1, 1, 7], [0, 0, generation])[2] == [1, 9, 0, 0]


def test_draft_steps_share_a_set() -> None:
    """Several deltas in one step: each leaves the tables as its own lengths say."""
    buffers = make("verify", q_len=1)
    buffers.load(BATCH)
    for delta in (1, 2, 3, 4, 1):
        assert buffers.metadata(2, delta).cache_seqlens.tolist() == [9 + delta, 5 + delta]
        wanted = reference.page_table(POOL, torch.tensor([3, 1]), torch.tensor([9 + delta, 5 + delta]), layout=LAYOUT)
        assert buffers.page_table[:2].tolist() == wanted.tolist()


@devices
def test_stages_of_a_step_share_a_set(device: str) -> None:
    """Draft steps, verify, and draft-extend with counts that the device alone knows, each as if it were alone."""
    buffers = make("verify", device)
    buffers.load(BATCH)
    counts = torch.tensor([3, 1, 7], device=device)  # 7: of a padding row, which nobody reads
    accepted: dict[str, Any] = {"seq_len_delta": 0, "q_len": counts, "seq_lens": buffers.seq_lens[:3] + counts}
    drafts = [{"seq_len_delta": k, "q_len": 1} for k in (1, 2, 3, 4)]
    stages = [(given, given, [9, 5, 0]) for given in drafts] + [({}, {"seq_len_delta": 4, "q_len": 4}, [9, 5, 0])]
    stages.append((accepted, {"q_len": torch.tensor([3, 1, 0]), "num_tokens": 12}, [12, 6, 0]))
    for given, wanted, lengths in stages * 2:
        oracle_of, _ = reference.decode_metadata(
            POOL, torch.tensor([3, 1, 0]), torch.tensor(lengths), layout=LAYOUT, num_reqs=torch.tensor(2),
            full_to_swa=MAP, **wanted,
        )  # fmt: skip
        for name, found, value in zip(oracle_of._fields, buffers.metadata(3, **given), oracle_of, strict=True):
            assert found.tolist() == value.tolist(), (name, given)


@pytest.mark.parametrize("batch_size", [-1, 5])
def test_a_bucket_that_the_buffers_have_no_rows_for_is_refused(batch_size: int) -> None:
    buffers = make("verify")
    buffers.load(BATCHES["verify"])
    with pytest.raises(ValueError, match=f"batch_size must be at (least 0|most 4), got {batch_size}"):
        buffers.metadata(batch_size)
    with pytest.raises(ValueError, match="q_len must be at most 4, got 5"):
        buffers.metadata(2, q_len=5)
    assert (buffers.held == make("verify").held).all()


def test_ring_clears_what_the_line_held_before() -> None:
    target = torch.full((6,), 77)
    ring = Ring(target, [2, 3])
    for fields, size, line in [
        (([7, 8], [4]), 6, [2, 7, 8, 4, 0, 0]),
        (([9], [1, 2, 3]), 6, [2, 9, 0, 1, 2, 3]),
        (([5],), 3, [2, 5, 0, 1, 2, 3]),
        (([], []), 6, [2, 0, 0, 0, 0, 0]),
    ]:
        ring.fill(2, fields)
        ring.send(size)
        assert target.tolist() == line


def test_ring_fills_the_second_field_alone_where_a_line_holds_the_others() -> None:
    target, lines = torch.zeros(9, dtype=torch.int64), 2
    ring = Ring(target, [2, 2, 2, 2], unsigned=2)
    others = [Ring(target, [2, 2, 2, 2]) for _ in range(lines)]
    ring.lines, ring.memory = [each.lines[0] for each in others], [each.memory[0] for each in others]
    ring.stamps = [0] * lines

    def kept(rows: list[int], lengths: list[int], generations: list[int]) -> None:
        ring.fill(len(rows), (rows, lengths, generations))
        ring.keep(rows, generations)

    rows = [7, 8]
    for fill, line in [
        (lambda: kept(rows, [40, 50], [1, 2]), [2, 7, 8, 40, 50, 1, 2]),
        (lambda: ring.fill_second([41, 51]), [2, 7, 8, 41, 51, 1, 2]),  # a line that held nothing
        (lambda: ring.fill_second([42, 52]), [2, 7, 8, 42, 52, 1, 2]),
        (lambda: ring.fill(1, ([3], [4], [5])), [1, 3, 0, 4, 0, 5, 0]),
        (lambda: ring.fill_second([43, 53]), [2, 7, 8, 43, 53, 1, 2]),
        (lambda: ring.fill_second([44, 54]), [2, 7, 8, 44, 54, 1, 2]),  # the line filled with something else
        (lambda: kept([9], [60], [3]), [1, 9, 0, 60, 0, 3, 0]),
        (lambda: ring.fill_second([61]), [1, 9, 0, 61, 0, 3, 0]),
        (lambda: ring.fill_second([62]), [1, 9, 0, 62, 0, 3, 0]),
        (lambda: ring.fill_second([63], [-7, 8]), [1, 9, 0, 63, 0, 3, 0, -7, 8]),
        (lambda: ring.fill_second([64], [6]), [1, 9, 0, 64, 0, 3, 0, 6, 0]),
        (lambda: ring.fill_second([65]), [1, 9, 0, 65, 0, 3, 0]),
        (lambda: kept([9], [66], [4]), [1, 9, 0, 66, 0, 4, 0]),
        (lambda: ring.fill_second([67], [5]), [1, 9, 0, 67, 0, 4, 0, 5, 0]),  # a line that held others
        (lambda: ring.fill_second([68], []), [1, 9, 0, 68, 0, 4, 0, 0, 0]),
    ]:
        fill()
        ring.send(len(line))
        assert target[: len(line)].tolist() == line
    for wrong in ([[-1]], [[69], [2**63]]):
        with pytest.raises(struct.error):
            ring.fill_second(*wrong)
    kept(rows, [1, 1], [0, 0])
    rows[0] = 5  # the caller's own list, changed in place
    assert ring.kept == ([7, 8], [0, 0])


@pytest.mark.parametrize("most", [-3, 0, 28, 127, 128, 2**31 - 1, 2**32 - 1])
def test_no_number_of_a_field_filled_alone_is_above_the_most(most: int) -> None:
    target, size = torch.zeros(1 + 3 * 66, dtype=torch.int64), 65
    ring = Ring(target, [66, 66, 66], unsigned=2, most=most)
    ring.fill(size, ([0] * size, [0] * size, [0] * size))
    ring.keep([0] * size, [0] * size)
    values = [0] * size
    for good in [value for value in (0, most - 1, most) if 0 <= value <= most]:
        values = [good if i % 2 else 0 for i in range(size)]
        ring.fill_second(values)
    for bad in (-1, *(value for value in (most + 1, 2 * most + 2, 2**31, 2**32 - 1, 2**32, 2**64) if value > most)):
        for others in (0, max(most, 0)):
            for at in (0, 1, 31, 64):
                with pytest.raises(struct.error):
                    ring.fill_second([bad if i == at else others for i in range(size)])
    ring.send(len(target))
    assert target.tolist() == [size, *[0] * 66, *values, *[0] * 67], "a refused line was written"


@pytest.mark.parametrize("most", [1, 28, 2**31 - 1, 2**32 - 1])
def test_no_bool_gets_into_a_field_filled_alone(most: int) -> None:
    target, size = torch.zeros(1 + 3 * 66, dtype=torch.int64), 65
    ring = Ring(target, [66, 66, 66], unsigned=2, most=most)
    ring.fill(size, ([0] * size, [0] * size, [0] * size))
    ring.keep([0] * size, [0] * size)
    for value in (False, True):
        for others in (0, 1, min(2, most), most):
            for at in (0, 1, 31, 64):
                with pytest.raises(TypeError, match="a value is a bool"):
                    ring.fill_second([value if i == at else others for i in range(size)])
                ring.fill_second([int(value) if i == at else others for i in range(size)])


def test_a_step_with_rows_as_before_is_checked_and_loaded_like_any_other() -> None:
    buffers = make()
    rows, generations = [3, 1], [0, 2]
    for lengths in ([7, 4], [8, 28], [9, 6]):
        buffers.load(DecodeBatch(rows, lengths, generations))
        assert buffers.req_pool_indices.tolist()[:2] == rows and buffers.seq_lens.tolist()[:2] == lengths
        assert buffers.generations.tolist()[:2] == generations
    for wrong in ([7], [7, -1], [7, 29], [29, 7], [7, 10**6], [7, 1.5], [7, 2**64], [7, True], [False, 7]):
        with pytest.raises((TypeError, ValueError), match="seq_lens"):
            buffers.load(DecodeBatch(rows, wrong, generations))
        assert buffers.seq_lens.tolist()[:2] == [9, 6]
    for tokens, held in (([5, 6], [5, 6, 0, 0]), (None, [5, 6, 0, 0]), ((8, -9), [8, -9, 0, 0])):
        buffers.load(DecodeBatch(rows, [10, 7], generations, token_ids=tokens))
        assert buffers.token_ids.tolist() == held and buffers.seq_lens.tolist() == [10, 7, 0, 0]
    for tokens in ([1, 2, 3], [1], [], [1, 2.0], [1, 2**63], 3, torch.tensor([1])):
        with pytest.raises((TypeError, ValueError), match=r"batch\.token_ids"):
            buffers.load(DecodeBatch(rows, [11, 8], generations, token_ids=tokens))
        assert buffers.token_ids.tolist() == [8, -9, 0, 0] and buffers.seq_lens.tolist() == [10, 7, 0, 0]
    rows[1] = 2
    buffers.load(DecodeBatch(rows, [9, 7], generations))
    assert buffers.req_pool_indices.tolist()[:2] == [3, 2] and buffers.seq_lens.tolist()[:2] == [9, 7]


class Event:
    """An event of a device that says what became of it."""

    def __init__(self, half: int, said: list[tuple[str, int]]) -> None:
        self.half, self.said = half, said

    def record(self, stream: object) -> None:
        assert stream == "stream of cpu"
        self.said.append(("record", self.half))

    def synchronize(self) -> None:
        self.said.append(("wait", self.half))


def test_a_half_of_the_ring_is_filled_anew_after_its_copies_landed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kind 22: a line is written only once the event behind the last copy out of its half has been waited for, and
    that is on the stream of the target's device, whichever device is current."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: f"stream of {device}")
    target, said = torch.zeros(2, dtype=torch.int64), list[tuple[str, int]]()
    ring = Ring(target, [1])
    lines = [Ring(target, [1]) for _ in range(2 * HALF)]
    ring.lines, ring.memory = [line.lines[0] for line in lines], [line.memory[0] for line in lines]
    ring.stamps = [0] * len(lines)
    ring.on_cuda, ring.sent = True, [Event(0, said), Event(1, said)]  # type: ignore[list-item]
    for step in range(3 * 2 * HALF):
        ring.fill(1, ([step],))
        said.append(("fill", ring.filling))
        ring.send(2)
        assert target.tolist() == [1, step]
    one_round = [
        event
        for half in (0, 1)
        for event in [("wait", half), *(("fill", half * HALF + i) for i in range(HALF)), ("record", half)]
    ]
    assert said == one_round * 3


@traces
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_step_is_one_launch_without_copies(mode: str, dynamic: bool) -> None:
    pytest.importorskip("triton")

    def step(buffers: DecodeBuffers, batch_size: int) -> Any:
        return buffers.metadata(batch_size)

    graphs = capture(step, make(mode), 3, target="cuda:sm_90", dynamic=dynamic)
    assert graphs.is_whole
    assert graphs.launches == {"update_metadata_kernel": 1}
    assert graphs.copies == [] and graphs.host_reads == []


@pytest.mark.gpu
@needs_cuda
def test_another_stream_is_refused() -> None:
    buffers = make(device="cuda")
    with (
        torch.cuda.stream(torch.cuda.Stream()),
        pytest.raises(RuntimeError, match="buffers belong to the stream they were made on"),
    ):
        buffers.load(BATCH)


@pytest.mark.gpu
@needs_cuda
def test_moved_buffers_serve_their_new_device() -> None:
    buffers = make("verify").cuda()
    buffers.load(BATCHES["verify"])
    assert buffers.metadata(2).cache_seqlens.tolist() == [13, 9]


@pytest.mark.gpu
@needs_cuda
def test_a_busy_device_still_reads_what_was_loaded() -> None:
    """Kind 22: more loads than there are host lines, queued behind a device that sleeps."""
    buffers = make(device="cuda")
    seen = torch.zeros(50, 4, dtype=torch.int64, device="cuda")
    torch.cuda._sleep(50_000_000)
    for step in range(50):
        buffers.load(DecodeBatch([1, 2], [step % 28, step % 13], [0, 0]))
        seen[step].copy_(buffers.seq_lens)
    assert seen.tolist() == [[step % 28, step % 13, 0, 0] for step in range(50)]


@pytest.mark.gpu
@needs_cuda
def test_load_waits_for_nothing_and_allocates_nothing() -> None:
    buffers = make(device="cuda")
    for _ in range(40):
        buffers.load(BATCH)
    torch.cuda.set_sync_debug_mode("error")
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    try:
        for _ in range(40):
            buffers.load(BATCH)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
