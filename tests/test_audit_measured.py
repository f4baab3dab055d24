"""What a device showed, beside what a trace says: with a device that is made up, and on a real one."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton", reason="the corpus launches kernels")

from compiled_kv.auditor import apart, audit, command
from compiled_kv.auditor.comparison import UNDECIDED, with_measured
from compiled_kv.auditor.device import Cuda
from compiled_kv.auditor.entry import load
from compiled_kv.auditor.findings import Report
from compiled_kv.auditor.measured import Measured, Wait
from compiled_kv.auditor.measuring import counted, measure
from compiled_kv.auditor.page import page
from compiled_kv.auditor.skips import skips_logged
from compiled_kv.tracing.reals import Reals
from tests import audit_entry, audit_on_gpu
from tests.audit_corpus import entries

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
KERNEL = {"cat": "kernel", "name": "bump"}


class MadeUp(Cuda):
    """A device on the CPU, whose waits are those of `wait` below."""

    device = torch.device("cpu")
    mode = "default"

    def __init__(self, refuses_capture: bool = False):
        self.refuses_capture = refuses_capture

    def name(self) -> str:
        return "a device"

    def synchronize(self) -> None:
        pass

    def sync_debug_mode(self, mode: str) -> None:
        MadeUp.mode = mode

    def compile(self, step: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        return torch.compile(step, backend="eager", dynamic=options["dynamic"])

    def profile(self, run: Callable[[], Any]) -> list[dict[str, Any]]:
        run()
        return [KERNEL, KERNEL, {"cat": "gpu_memcpy", "name": "DtoH"}, {"cat": "cpu_op", "name": "aten::add"}]

    def capture(self, run: Callable[[], Any]) -> None:
        if self.refuses_capture:
            raise RuntimeError("operation not permitted when stream is capturing\nmore of it")
        run()

    @contextmanager
    def replays(self) -> Iterator[list[int]]:
        self.seen = [0]
        yield self.seen


@torch._dynamo.disable
def wait() -> None:
    if MadeUp.mode == "error":
        raise RuntimeError("called a synchronizing CUDA operation")
    if MadeUp.mode == "warn":
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)  # here


def line_that_ends(mark: str) -> int:
    return next(i for i, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith(mark))


WAIT_LINE = line_that_ends("# here")


def waiting(x: Tensor) -> Tensor:
    x = x + 1
    wait()
    return x * 2


def plain(x: Tensor) -> Tensor:
    return x + 1


def test_waits_graphs_and_kernels_are_noted_with_their_lines() -> None:
    seen = measure(waiting, [torch.zeros(4)], cuda=MadeUp())
    assert seen.eager_waits == (Wait(__file__, WAIT_LINE),) and len(seen.waits or ()) == 1
    assert seen.waits_raised == "RuntimeError: called a synchronizing CUDA operation" and seen.waited
    assert seen.graphs == 2 and seen.captured and not seen.failures
    assert seen.kernels == {"bump": 2} and seen.memory == {"DtoH": 1}


log = logging.Logger("of a step")
log.addHandler(logging.StreamHandler(io.StringIO()))


def logging_values(x: Tensor) -> Tensor:
    log.warning("values %s", x)  # formatted
    return x + 1


def test_a_wait_inside_pythons_own_library_is_placed_where_the_trace_places_it(monkeypatch: pytest.MonkeyPatch) -> None:
    report = audit(logging_values, torch.zeros(4))
    (finding,) = (each for each in report.findings if each.rule == "host-read")
    assert finding.place.endswith(f"test_audit_measured.py:{line_that_ends('# formatted')}")

    # On a device torch waits in its own code, called by logging's.
    names: dict[str, Any] = {"wait": warnings.warn}
    text = "def text(*_, **__): return repr(wait('called a synchronizing CUDA operation'))"
    exec(compile(text, torch._tensor_str.__file__, "exec"), names)
    monkeypatch.setattr(torch._tensor_str, "_str", names["text"])
    seen = measure(logging_values, [torch.zeros(4)], cuda=MadeUp())
    assert seen.eager_waits == (Wait(finding.file, finding.line),)
    assert "waited here once in an eager step" in str(with_measured(report, seen))


def test_a_step_that_never_waits_is_noted_as_such() -> None:
    seen = measure(plain, [torch.zeros(4)], cuda=MadeUp())
    assert seen.eager_waits == seen.waits == () and seen.waits_raised == "" and not seen.waited
    assert (seen.graphs, seen.recompiles, seen.captured, seen.replayed, seen.skips) == (1, (), True, 0, ())


def test_other_batches_show_what_compiles_again() -> None:
    seen = measure(plain, [torch.zeros(4)], batches=[[torch.zeros(5)]], dynamic=False, cuda=MadeUp())
    assert len(seen.recompiles or ()) == 1 and "size mismatch" in (seen.recompiles or ("",))[0]


def test_what_fails_is_noted_and_the_rest_goes_on() -> None:
    class NoProfiler(MadeUp):
        def profile(self, run: Callable[[], Any]) -> list[dict[str, Any]]:
            raise OSError("no tracing library")

    seen = measure(plain, [torch.zeros(4)], cuda=NoProfiler(refuses_capture=True))
    assert seen.failures == {"profiler": "OSError: no tracing library"} and seen.kernels is None
    assert seen.captured is False
    assert seen.not_captured == "RuntimeError: operation not permitted when stream is capturing"
    assert seen.graphs == 1


def test_what_torch_cannot_compile_with_scalars_captured_is_measured_without() -> None:
    def column(x: Tensor, lens: Tensor) -> Tensor:
        return x[:, lens.max().item()]

    seen = measure(column, [torch.zeros(4, 8), torch.ones(4, dtype=torch.int64)], cuda=MadeUp())
    assert list(seen.failures) == ["compiled with scalars captured"] and "IndexError" in str(seen.failures)
    assert seen.graphs and seen.captured and seen.waits == ()


def test_every_step_of_the_corpus_that_needs_no_device_runs() -> None:
    needs = {"synchronized", "pinned", "carved_workspace", "overlapping_slices", "mutated_and_read"}
    needs |= {"functional_kernel", "kernel_into_fresh_buffer", "pinned_scratch", "stream_synchronized", "saved_rng"}
    needs |= {"there_and_back", "long_tensor", "cuda_method", "to_cuda_by_name", "on_cuda_by_name", "moved_where_it_is"}
    needs |= {"if_capturing", "nested_compile"}  # the latter would be built by a C++ compiler
    for name in set(audit_on_gpu.STEPS) - needs:
        audit_on_gpu.STEPS[name](*Reals(torch.device("cpu")).arguments(entries.arguments(audit_on_gpu.STEPS[name])))


def test_a_step_that_raises_on_the_device_fails_in_every_part() -> None:
    def raising(x: Tensor) -> Tensor:
        raise OverflowError("no")

    seen = measure(raising, [torch.zeros(4)], cuda=MadeUp())
    assert seen.failures["eager"] == "OverflowError: no" and seen.captured is None and seen.graphs is None
    report = with_measured(audit(plain, torch.zeros(4)), seen)
    assert [each.rule for each in report.findings] == ["measured-error"] and not report.ok


def test_a_device_that_fails_for_good_is_still_named() -> None:
    class Spoilt(MadeUp):
        spoilt = False

        def name(self) -> str:
            assert not self.spoilt
            return "a device"

        def synchronize(self) -> None:
            self.spoilt = True
            raise RuntimeError("CUDA error: device-side assert triggered")

    seen = measure(plain, [torch.zeros(4)], cuda=Spoilt())
    assert seen.device == "a device" and seen.not_captured == "RuntimeError: CUDA error: device-side assert triggered"
    assert seen.captured is None and set(seen.failures.values()) == {seen.not_captured}


def test_a_measurement_survives_json() -> None:
    seen = measure(waiting, [torch.zeros(4)], cuda=MadeUp())
    assert Measured.of(json.loads(json.dumps(asdict(seen)))) == seen


def test_copies_and_kernels_are_told_apart_from_what_the_host_does() -> None:
    names = ["kernel", "gpu_memset", "gpu_memcpy", "cuda_runtime", "gpu_user_annotation", None]
    assert counted([{"cat": name, "name": f"a {name}"} for name in names]) == (
        {"a kernel": 1},
        {"a gpu_memcpy": 1, "a gpu_memset": 1},
    )


def test_skip_reasons_are_read_from_inductors_log() -> None:
    import torch._inductor.cudagraph_utils as utils

    before = (utils.cudagraphs_log.level, list(utils.cudagraphs_log.handlers))
    with skips_logged() as reasons:
        utils.cudagraphs_log.warning("skipping cudagraphs due to mutated inputs (1 instances). Found from : \n  f.py")
        utils.cudagraphs_log.warning("something else")
    assert reasons == ["mutated inputs (1 instances)"]
    assert before == (utils.cudagraphs_log.level, list(utils.cudagraphs_log.handlers))


CLEAN = Measured(
    "a device", "torch 2", (), (), "", {"bump": 2}, {}, 1, (), 1, (), True,
)  # fmt: skip


def reading() -> Report:
    step, arguments = audit_entry.reading()
    return audit(step, *arguments)


def test_a_finding_says_what_the_device_showed_of_it() -> None:
    report = reading()
    (finding,) = report.findings
    here = Wait(finding.file, finding.line)
    seen = replace(CLEAN, eager_waits=(here, Wait("other.py", 1)), waits=(Wait("", 0),), captured=False)
    both = with_measured(report, seen)
    assert [each.rule for each in both.findings] == ["host-read"]  # what is known already is no second finding
    assert both.findings[0].measured == "waited here once in an eager step; a compiled one waited once"
    assert "measured: waited here once" in str(both) and not both.ok


def test_what_the_device_alone_showed_becomes_a_finding() -> None:
    report = audit(plain, torch.zeros(4))
    assert report.ok and UNDECIDED in report.undecided and report.not_measured == "not asked for"
    agreed = with_measured(report, CLEAN)
    assert agreed.ok and UNDECIDED not in agreed.undecided
    spoilt: dict[str, dict[str, Any]] = {
        "measured-wait": {"waits": (Wait("", 0),)},
        "measured-capture": {"captured": False, "not_captured": "RuntimeError: no"},
        "measured-recompile": {"recompiles": ("size mismatch",)},
    }
    for rule, changes in spoilt.items():
        disputed = with_measured(report, replace(CLEAN, **changes))
        assert [each.rule for each in disputed.findings] == [rule] and not disputed.ok
    skipped = with_measured(report, replace(CLEAN, replayed=0, skips=("cpu device",)))
    assert [(each.rule, each.severity) for each in skipped.findings] == [("measured-capture", "warning")]
    assert "CUDA graphs were skipped: cpu device" in str(skipped)


def test_static_and_measured_stand_side_by_side_in_every_form() -> None:
    report = with_measured(reading(), replace(CLEAN, failures={"profiler": "OSError: no"}, kernels=None))
    rows = {what: (static, measured) for what, static, measured in report.beside()}
    assert rows["graphs"] == ("1, 13 nodes", "1") and rows["kernel launches"] == ("none", "unknown")
    assert rows["host waits"] == ("1 line", "0 in a compiled step, 0 in an eager one")
    assert rows["reduce-overhead"] == ("", "1 replayed a step")
    assert rows["captured by hand"] == ("", "captured and replayed")
    assert rows["failed: profiler"] == ("", "OSError: no")
    told = json.loads(report.to_json())
    assert told["measured"]["replayed"] == 1 and told["findings"][0]["measured"].startswith("waited here not once")
    assert {"what": "graphs", "static": "1, 13 nodes", "measured": "1"} in told["beside"]
    html = page(report)
    assert "<th>static<th>measured" in html and "<td>captured and replayed" in html and "<b>measured</b> waited" in html
    assert "host waits       1 line  |  measured: 0 in a compiled step" in str(report)


def test_no_device_is_said_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert apart.obstacle("cuda:sm_90") == "no CUDA device"
    assert apart.obstacle("cpu") == "the target is the CPU"


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("cuda:sm_90", None),
        ("cuda", None),
        ("cuda:sm_80", "the device here is NVIDIA H200 (90), the target cuda:sm_80"),
        ("hip:gfx942", "the device here is NVIDIA H200 (90), the target hip:gfx942"),
    ],
)
def test_only_the_device_that_is_the_target_is_measured(
    target: str, why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    assert apart.obstacle(target) == why


def run(*arguments: str) -> tuple[int, str]:
    testing = pytest.importorskip("click.testing")
    result = testing.CliRunner().invoke(command.command, list(arguments))
    return result.exit_code, result.output


def test_the_command_runs_the_step_where_its_device_is(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    asked: list[Any] = []

    def measured(entry: str, sizes: list[int], dynamic: bool | None, scalars: bool) -> Measured:
        asked.append((entry, sizes, dynamic, scalars))
        return CLEAN

    monkeypatch.setattr(command, "obstacle", lambda target: None)
    monkeypatch.setattr(command, "measure_apart", measured)
    status, text = run("tests.audit_entry:whole", "--batch-sizes", "4", "--dynamic")
    assert status == 0 and asked == [("tests.audit_entry:whole", [4], True, True)]
    assert "measured" in text and "captured and replayed" in text
    assert "not: not asked for" in run("tests.audit_entry:whole", "--no-measure")[1] and len(asked) == 1
    monkeypatch.setattr(command, "measure_apart", lambda *_: "it took longer than 600 s")
    assert "not: it took longer than 600 s" in run("tests.audit_entry:whole")[1]
    monkeypatch.setattr(command, "measure_apart", lambda *_: replace(CLEAN, captured=False, not_captured="no"))
    assert run("tests.audit_entry:whole")[0] == 1


def test_how_a_step_is_compiled_reaches_the_process_that_measures_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def measured(*_: Any, batches: list[Any], **how: Any) -> Measured:
        seen.append((len(batches), how))
        return CLEAN

    def run_here(command: list[str], **_: Any) -> Any:
        monkeypatch.setattr(sys, "argv", command[2:])
        apart.main()
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(apart, "measure", measured)
    monkeypatch.setattr(apart.os, "_exit", lambda status: None)
    monkeypatch.setattr(subprocess, "run", run_here)
    assert apart.measure_apart("tests.audit_entry:whole") == CLEAN
    assert apart.measure_apart("tests.audit_entry:whole", [4, 5, 6], False, False) == CLEAN
    assert seen == [(0, {"dynamic": None, "capture_scalars": True}), (2, {"dynamic": False, "capture_scalars": False})]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_a_process_that_cannot_measure_says_why_in_a_line() -> None:
    why = apart.measure_apart("tests.audit_entry:whole")
    assert isinstance(why, str) and why.count("\n") == 0 and ("CUDA" in why or "NVIDIA" in why)


def test_tensors_move_with_their_views_and_ties() -> None:
    pool = torch.zeros(6, 4)
    layer = nn.Linear(4, 4)
    torch._dynamo.mark_static_address(pool)
    there = Reals(torch.device("meta"))
    moved, view, weight = there.arguments((pool, pool[2:, 1:], layer.weight))
    assert moved.device.type == view.device.type == "meta" and isinstance(weight, nn.Parameter)
    assert view.untyped_storage()._cdata == moved.untyped_storage()._cdata and view.storage_offset() == 9
    assert moved._dynamo_static_input_type == pool._dynamo_static_input_type
    assert Reals(torch.device("cpu")).arguments(pool) is pool
    with pytest.raises(ValueError, match="tensor arguments must hold data to be run, got one on the meta device"):
        Reals(torch.device("cpu")).arguments(moved)


def test_the_corpus_table_counts_where_audit_and_device_agree(tmp_path: Path) -> None:
    results = [
        audit_on_gpu.Result("cpu", ("host-read",), replace(CLEAN, waits=(Wait("", 0),), captured=False)),
        audit_on_gpu.Result("tolist", ("host-read",), CLEAN),
        audit_on_gpu.Result("pool", ("mutated-input",), replace(CLEAN, replayed=0, skips=("a | b",))),
        audit_on_gpu.Result("plain", (), CLEAN),
        audit_on_gpu.Result("absent", (), "it took longer than 120 s"),
    ]
    audit_on_gpu.write(tmp_path / "new", results)
    told = (tmp_path / "new" / "audit_on_gpu.md").read_text()
    waits = told.partition("the host waits in a compiled step")[2].partition("###")[0]
    assert "| the audit: yes | 1 | 1 |\n| the audit: no | 0 | 2 |" in waits
    assert "the audit alone: tolist" in waits and "not compared: absent" in waits
    assert "| mutated-input | 1 | 0 | 0 | 1 |" in told and "| host-read | 2 | 1 | 1 | 0 |" in told
    assert "skipped: a / b" in told and "4 of 5 steps ran" in told
    kept = json.loads((tmp_path / "new" / "audit_on_gpu.json").read_text())
    assert [each["name"] for each in kept] == ["cpu", "tolist", "pool", "plain", "absent"]


def test_a_step_of_the_corpus_that_fails_is_listed_and_never_fatal(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(entry: str, seconds: float) -> Measured | str:
        assert load(entry)()[0] is audit_on_gpu.STEPS[entry.partition(":")[2]]
        raise OSError("no process")

    monkeypatch.setattr(audit_on_gpu, "measure_apart", fails)
    late = audit_on_gpu.collect(["item"], "cuda:sm_90", seconds=0.0, workers=1)
    assert late == [audit_on_gpu.Result("item", (), "not run: no time was left")]
    (result,) = audit_on_gpu.collect(["cpu"], "tpu", seconds=60.0, workers=1)
    assert result.measured == "OSError: no process" and str(result.rules).startswith(
        "audit: ValueError: target must be"
    )


@pytest.mark.gpu
@needs_cuda
def test_on_a_device_a_whole_step_is_captured_and_never_waits() -> None:
    seen = apart.measure_apart("tests.audit_entry:whole")
    assert isinstance(seen, Measured), seen
    assert seen.waits == seen.eager_waits == () and seen.captured and seen.failures == {}
    assert seen.replayed == 1 and seen.skips == () and seen.graphs == 1 and seen.recompiles == ()
    assert seen.kernels and sum(seen.kernels.values()) >= 1


@pytest.mark.gpu
@needs_cuda
def test_on_a_device_a_host_read_waits_at_its_line_and_is_not_captured() -> None:
    seen = apart.measure_apart("tests.audit_entry:reading")
    assert isinstance(seen, Measured), seen
    assert Wait(audit_entry.__file__, 14) in (seen.eager_waits or ()) and seen.waited
    assert seen.captured is False and "capture" in seen.not_captured.lower()


@pytest.mark.gpu
@needs_cuda
def test_on_a_device_the_command_lays_both_side_by_side() -> None:
    pytest.importorskip("rich")
    major, minor = torch.cuda.get_device_capability()
    status, text = run("tests.audit_entry:whole", "--json", "--target", f"cuda:sm_{major}{minor}")
    told = json.loads(text)
    assert status == 0 and told["measured"]["captured"] and told["undecided"] == []
