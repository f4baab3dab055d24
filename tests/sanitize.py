"""Every kernel once over, for a tool that watches their memory (tools/gpu_sanitize.sh).

Named batches from none to a few rows in every form, drawn calls of the peers' operators, schedules of up to three
chunks, scenarios through captured graphs, a pool of more than 2^31 elements, and rows long enough to be shared with
helpers or taken one by one; each result is compared as in the tests. `--device cpu` tries the script itself.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import pytest
import torch

import compiled_kv as ckv
from compiled_kv import KVLayout, reference
from compiled_kv.replay.check import check_replay, metadata_step
from compiled_kv.replay.scenarios import serving, story, walk
from tests.cases import ALL_CASES, FORMS
from tests.harness import check
from tests.peer_calls import CALLS, check_call
from tests.test_large import test_three_rows_much_longer_than_others as long_rows
from tests.test_update_turns import test_long_rows_join_among_short_ones_and_shrink as join_long_rows
from tests.test_updates import test_rows_beyond_two_to_the_31_elements as update_beyond_31_bits


def named(device: str, every: int) -> int:
    calls = [(form, batch) for form in FORMS for batch in ALL_CASES.values()][::every]
    for form, batch in calls:
        check(form, batch, device)
    return len(calls)


def peers(device: str, every: int) -> int:
    seeds = range(max(6 // every, 2))
    for operator in CALLS:
        for seed in seeds:
            check_call(operator, seed, device)
    return len(CALLS) * len(seeds)


def schedules(device: str, _: int) -> int:
    sizes = (1, 2, 31, 64, 257, 512, 513, 1100)
    for size in sizes:
        lengths = torch.randint(0, 9000, (size,), generator=torch.Generator().manual_seed(size), dtype=torch.int32)
        for num_reqs in (None, torch.tensor([size // 2])):
            there = None if num_reqs is None else num_reqs.to(device)
            made = ckv.flashmla_schedule(lengths.to(device), num_sm_parts=132, num_reqs=there)
            wanted = reference.flashmla_schedule(lengths, num_sm_parts=132, num_reqs=num_reqs)
            for found, expected in zip(made, wanted, strict=True):
                assert torch.equal(found.cpu(), expected), size
    return 2 * len(sizes)


def replays(device: str, every: int) -> int:
    modes = [("decode", None), ("verify", 64), ("extend", 64)]
    for mode, window in modes:
        given = serving(mode, page_size=16, max_context_len=512, max_batch_size=8, window=window)
        for scenario in (story(given), walk(given, steps=max(60 // every, 8), seed=3)):
            check_replay(metadata_step, scenario, device=device, backend=None, attempts=0)
    return 2 * len(modes)


def large(device: str, _: int) -> int:
    """Slots at the end of a row that begins beyond element 2^31, rows long enough to be shared with helpers, and rows
    that an update takes one after the other."""
    if device == "cpu":
        return 0
    update_beyond_31_bits(torch.int32)
    layout = KVLayout(page_size=64, max_context_len=1 << 20)
    pool = torch.zeros(2049, 1 << 20, dtype=torch.int32, device=device)
    pool[2048, -64:] = 2**31 - 64 + torch.arange(64, dtype=torch.int32, device=device)
    rows, lengths = torch.tensor([2048], device=device), torch.tensor([1 << 20], device=device)
    meta = ckv.decode_metadata(pool, rows, lengths, layout=layout)
    assert meta.page_table[0, -1].item() == (2**31 - 64) // 64
    assert meta.slot_mapping is not None and meta.slot_mapping.item() == 2**31 - 1
    assert torch.equal(ckv.page_table(pool, rows, lengths, layout=layout), meta.page_table)
    assert ckv.slot_mapping(pool, rows, lengths - 1).item() == 2**31 - 1
    for is_mapped in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            join_long_rows(device, is_mapped, 2, patch)
        for page_size in (1, 16):
            long_rows(device, 1 << 20, is_mapped, page_size)
    return 10


PARTS: dict[str, Callable[[str, int], int]] = {
    "schedules": schedules, "replays": replays, "peers": peers, "named": named, "large": large,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--every", type=int, default=1, help="of the named calls, every so many; fewer of the others")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    given = parser.parse_args()
    began = time.monotonic()
    for name in given.parts:
        calls = PARTS[name](given.device, given.every)
        print(f"{time.monotonic() - began:.0f} s: {name}: {calls} calls, all as they must be", flush=True)


if __name__ == "__main__":
    main()
