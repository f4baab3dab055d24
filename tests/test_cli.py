"""The command line: whole summaries, and one line with exit status 2 for every wrong command, option and value."""

from __future__ import annotations

import subprocess
import sys

import pytest

testing = pytest.importorskip("click.testing")
pytest.importorskip("rich")
pytest.importorskip("transformers")

from compiled_kv.cli import COMMANDS, main  # noqa: E402


def run(*arguments: str) -> tuple[int, str]:
    result = testing.CliRunner().invoke(main, list(arguments), prog_name="compiled-kv")
    return result.exit_code, result.output


def test_help_shows_each_commands_whole_summary() -> None:
    status, text = run("--help")
    said = " ".join(text.split())
    assert status == 0 and "..." not in text.replace("[ARGS]...", "")
    assert "audit Audit the step that FUNCTION returns, as (step, arguments): does it compile whole, and what" in said
    for name in COMMANDS:
        assert run(name, "--help")[0] == 0


WRONG: dict[str, str] = {
    "fly": "No such command 'fly' (see compiled-kv --help)",
    "--fly": "No such option '--fly'",
    "audit": "Missing argument 'MODULE:FUNCTION' (see compiled-kv audit --help)",
    "audit a:b c": "Got unexpected extra argument",
    "audit a:b --target": "Option '--target' requires an argument",
    "audit a:b --batch-sizes 1,0": "must be numbers from 1 on with commas between, got '1,0'",
    "audit a:b --batch-sizes=": "must be numbers from 1 on with commas between, got ''",
    "audit a:b --html /": "must be a file in a directory that exists, got '/'",
    "audit a:b --html /absent/page.html": "must be a file in a directory that exists, got '/absent/page.html'",
    "audit a:b --fail-on never": "'never' is not one of 'note', 'warning', 'error'",
    "audit a:b --json=3": "'--json' does not take a value",
    "demo --model gpt": "'gpt' is not one of 'llama'",
    "demo --device tpu": "tpu cannot be used",
    "demo --trace /absent": "/absent: No such file or directory",
    "demo --batch x": "'x' is not a valid integer",
    "demo --backend gcc": "'gcc' is not one of 'inductor'",
    "replay nowhere": "the step must be given as MODULE:FUNCTION, got 'nowhere'",
    "replay nowhere:step": "cannot import nowhere: ModuleNotFoundError",
    "replay --scenario x": "'x' is not one of 'story'",
    "replay --mode x": "'x' is not one of 'decode'",
    "replay --steps 0": "0 is not in the range x>=1",
    "replay --seed x": "'x' is not a valid integer",
    "replay --trace /absent": "/absent: No such file or directory",
    "replay --events /": "/: Is a directory",
    "replay --device tpu": "must be cpu or cuda, got 'tpu'",
    "replay --device cpu:x": "cpu:x cannot be used",
    "replay --batch 0": "0 is not in the range x>=1",
    "replay --page-size 0": "0 is not in the range x>=1",
    "replay --context 7": "7 is not in the range x>=8",
    "replay --window 0": "0 is not in the range x>=1",
}


@pytest.mark.parametrize(("command", "message"), WRONG.items(), ids=list(WRONG))
def test_what_is_wrong_is_said_in_one_line(command: str, message: str) -> None:
    status, text = run(*command.split())
    assert status == 2
    assert message in text and text.count("\n") == 1 and text.startswith("Error: ")


@pytest.mark.parametrize(
    ("missing", "forgotten"), [("transformers", ()), ("rich.console", ("compiled_kv.demo.command",))]
)
def test_what_the_demo_lacks_is_named_with_what_installs_it(
    missing: str, forgotten: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the models are missing, and where a module that the command imports is."""
    monkeypatch.setitem(sys.modules, missing, None)
    for name in forgotten:
        monkeypatch.delitem(sys.modules, name, raising=False)
    status, text = run("demo", "--requests", "1")
    assert (status, text) == (2, f"Error: demo needs {missing}: pip install 'compiled_kv[cli,models]'\n")


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("compiled_kv", "the command line needs click: pip install 'compiled_kv[cli]'"),
        ("compiled_kv.bench", "the benchmark needs click: pip install 'compiled_kv[bench]'"),
    ],
)
def test_without_click_one_line_says_what_to_install(module: str, said: str) -> None:
    script = f"import runpy, sys; sys.modules['click'] = None; runpy.run_module({module!r}, run_name='__main__')"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr.strip()) == (2, said)
