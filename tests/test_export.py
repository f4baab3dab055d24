"""Exported metadata: one call for every batch size, and packages that a C++ loop runs as the page of docs/ says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compiled_kv as ckv
from compiled_kv import reference
from tests.cases import needs_cuda

EVERYTHING = "COMPILED_KV_EXAMPLES" in os.environ


def _libstdcxx() -> str:
    """The C++ library that torch's compiler links packages with, as a real path; a bare name where it has none."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        return "no compiler"
    asked = [compiler, "-print-file-name=libstdc++.so.6"]
    return os.path.realpath(subprocess.run(asked, capture_output=True, text=True).stdout.strip())


def _is_loaded(library: str) -> bool:
    maps = Path("/proc/self/maps")
    return not maps.exists() or library in maps.read_text()


loads_packages = pytest.mark.skipif(
    not _is_loaded(_libstdcxx()),
    reason=f"torch would link packages with {_libstdcxx()}, not with the C++ library loaded here, and crash: set CXX",
)
PAGE = (Path(__file__).parent.parent / "docs" / "integrations" / "export.md").read_text()
LAYOUT = ckv.KVLayout(page_size=4, max_context_len=30, max_draft_tokens=2, window=9)
POOL = torch.stack([torch.randperm(8, generator=torch.Generator().manual_seed(row)) + 8 * row for row in range(6)])
SLOTS = (POOL[..., None] * 4 + torch.arange(4)).flatten(1).to(torch.int32)  # [6, 32], pages in any order
MAP = torch.arange(192).flip(0)
PAGES = torch.arange(48).roll(5)
MAX_TOKENS = 40

FORMS: dict[str, dict[str, Any]] = {
    "decode": {},
    "verify-token-map": {"seq_len_delta": 2, "q_len": 2, "full_to_swa": MAP},
    "ragged-page-map": {"q_len": "lens", "num_tokens": MAX_TOKENS, "page_map": PAGES},
}
BATCHES: dict[str, tuple[list[int], list[int], int]] = {  # rows, lengths, rows in use
    "example": ([3, 0, 5], [7, 30, 1], 3),
    "one": ([2], [29], 1),
    "padded": ([1, 4, 0, 2, 5, 3, 1], [0, 12, 4, 5, 30, 2, 9], 5),
}


class Metadata(nn.Module):
    """`decode_metadata` of one form; what it omits is left out."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.options = dict(FORMS[form])

    def forward(self, req_to_token: Tensor, rows: Tensor, seq_lens: Tensor, q_lens: Tensor, num_reqs: Tensor) -> Any:
        options = self.options | ({"q_len": q_lens} if self.options.get("q_len") == "lens" else {})
        made = ckv.decode_metadata(req_to_token, rows, seq_lens, layout=LAYOUT, num_reqs=num_reqs, **options)
        return tuple(tensor for tensor in made if tensor is not None)


def arguments(batch: str, device: str = "cpu") -> tuple[Tensor, ...]:
    rows, lengths, live = BATCHES[batch]
    q_lens = [1 + i % 3 for i in range(len(rows))]
    tensors = (
        SLOTS, torch.tensor(rows, dtype=torch.int64), torch.tensor(lengths, dtype=torch.int32),
        torch.tensor(q_lens, dtype=torch.int64), torch.tensor([live]),
    )  # fmt: skip
    return tuple(tensor.to(device) for tensor in tensors)


def expected(form: str, batch: str) -> list[Tensor]:
    """What the oracle makes of it."""
    pool, rows, seq_lens, q_lens, num_reqs = arguments(batch)
    options = FORMS[form] | ({"q_len": q_lens} if FORMS[form].get("q_len") == "lens" else {})
    made, _ = reference.decode_metadata(pool, rows, seq_lens, layout=LAYOUT, num_reqs=num_reqs, **options)
    return [field for field in made if field is not None]


def exported(form: str, device: str = "cpu") -> torch.export.ExportedProgram:
    size = torch.export.Dim("batch", min=1, max=64)
    shapes = (None, {0: size}, {0: size}, {0: size}, None)
    module = Metadata(form)
    module.options = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in module.options.items()}
    return torch.export.export(module, arguments("example", device), dynamic_shapes=shapes)


def check(run: Callable[..., Any], form: str, device: str = "cpu") -> None:
    for batch in BATCHES:
        for got, want in zip(run(*arguments(batch, device)), expected(form, batch), strict=True):
            torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0)


@pytest.mark.parametrize("form", FORMS)
def test_an_exported_program_is_one_call_and_right_for_every_batch(form: str, tmp_path: Path) -> None:
    program = exported(form)
    assert [str(n.target) for n in program.graph.nodes if "compiled_kv" in str(n.target)] == [
        "compiled_kv.decode_metadata.default"
    ]
    check(program.module(), form)
    torch.export.save(program, tmp_path / "metadata.pt2")
    check(torch.export.load(tmp_path / "metadata.pt2").module(), form)


@pytest.mark.skipif(not EVERYTHING, reason="make test-all runs it")
@pytest.mark.parametrize("form", FORMS)
def test_a_package_is_right_for_every_batch(form: str, tmp_path: Path) -> None:
    check(packaged(exported(form), tmp_path), form)


@pytest.mark.skipif(not EVERYTHING, reason="make test-all runs it")
def test_an_in_place_package_keeps_the_columns_past_the_live_ones(tmp_path: Path) -> None:
    names = page_programs()
    run, out = packaged(names["in_place"], tmp_path), names["buffers"](3)
    assert run(names["req_to_token"], names["rows"], names["seq_lens"], names["num_reqs"], *out) is None
    assert out[3].tolist() == [[4, -7, -7, -7], [8, 9, -7, -7], [-7, -7, -7, -7]]
    assert out[4].tolist() == [64 + 4, 128 + 29, -1]


@pytest.mark.gpu
@needs_cuda
@loads_packages
@pytest.mark.parametrize("form", FORMS)
def test_a_package_for_a_cuda_device_is_right_for_every_batch(form: str, tmp_path: Path) -> None:
    check(packaged(exported(form, "cuda"), tmp_path), form, "cuda")


def packaged(program: torch.export.ExportedProgram, folder: Path) -> Callable[..., Any]:
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "metadata.pt2"))
    return torch._inductor.aoti_load_package(path)


def page_block(title: str) -> str:
    found = re.search(rf'```\w+ title="{title}"\n(.*?)```', PAGE, re.DOTALL)
    assert found, title
    return found[1]


def page_programs() -> dict[str, Any]:
    """The names that the page's programs leave."""
    names: dict[str, Any] = {}
    for program in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(program, names)
    return names


def run_page(folder: Path, device: str) -> str:
    """Make the page's package for `device`, build the page's loop, and run it: what it prints."""
    program = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert program
    folder.joinpath("loop.cpp").write_text(page_block("loop.cpp"))
    with pytest.MonkeyPatch.context() as patch, torch.device(device):
        patch.chdir(folder)
        exec(program[1] + page_block("package.py"), {})
    torch_folder = Path(torch.__path__[0])
    command = re.search(r"```sh\n(.*?)\n\./loop", PAGE, re.DOTALL)
    assert command
    script = command[1] + (" -ltorch_cuda -lc10_cuda" if device == "cuda" else "")
    subprocess.run(script, shell=True, check=True, cwd=folder, env=os.environ | {"TORCH": str(torch_folder)})
    ran = subprocess.run(
        ["./loop", "decode_metadata.pt2", device], cwd=folder, capture_output=True, text=True, check=True
    )
    return ran.stdout


def page_output() -> str:
    shown = re.search(r"\./loop decode_metadata.pt2 cpu\n```\n```text\n(.*?)```", PAGE, re.DOTALL)
    assert shown
    return shown[1]


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@needs_compiler
def test_a_cpp_loop_without_python_prints_what_the_page_shows(tmp_path: Path) -> None:
    assert run_page(tmp_path, "cpu") == page_output()


@pytest.mark.gpu
@needs_cuda
@loads_packages
@needs_compiler
def test_on_a_cuda_device_the_cpp_loop_prints_the_same(tmp_path: Path) -> None:
    assert run_page(tmp_path, "cuda") == page_output()


def test_the_auditor_finds_nothing_in_the_page_s_programs() -> None:
    names = page_programs()
    example = (names["req_to_token"], names["rows"], names["seq_lens"])
    metadata = ckv.audit(names["Metadata"](), *example, names["full_to_swa"], names["num_reqs"], target="cuda:sm_90")
    assert metadata.findings == () and metadata.is_whole, str(metadata)
    step, buffers = names["InPlace"](), names["buffers"](3)
    in_place = ckv.audit(step, *example, names["num_reqs"], *buffers, target="cuda:sm_90")
    assert in_place.findings == () and in_place.is_whole, str(in_place)
    unmarked = ckv.audit(step, *example, names["num_reqs"], *(b.clone() for b in buffers), target="cuda:sm_90")
    assert {finding.rule for finding in unmarked.findings} == {"mutated-input"}, str(unmarked)
