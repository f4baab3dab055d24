"""The README and the pages of docs/ say what the package does: their code runs, and their links lead somewhere."""

from __future__ import annotations

import contextlib
import doctest
import inspect
import io
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import compiled_kv as ckv
from compiled_kv import reference

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SESSION = re.compile(r"```pycon\n(.*?)```", re.DOTALL)
PROGRAM = re.compile(r"```python\n(.*?)```(?:\s*```text\n(.*?)```)?", re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
FUNCTIONS = [name for name in ckv.__all__ if inspect.isfunction(getattr(ckv, name))]
OPERATORS = sorted(set(FUNCTIONS) & set(vars(reference)))


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def run_sessions(page: Path, package: object) -> doctest.TestResults:
    """Replay a page's sessions with `package` in the place of compiled_kv."""
    text = "".join(SESSION.findall(page.read_text())).replace("import compiled_kv as ckv", "pass")
    test = doctest.DocTestParser().get_doctest(text, {"ckv": package}, page.name, str(page), 0)
    report = io.StringIO()
    results = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=report.write)
    assert results.failed == 0, report.getvalue()
    return results


@pytest.mark.parametrize("page", [page for page in PAGES if SESSION.search(page.read_text())], ids=name_of)
def test_sessions_print_what_the_page_shows(page):
    assert run_sessions(page, ckv).attempted > 0


def test_worked_example_is_what_the_oracle_computes():
    def decode_metadata(*args, status=None, **options):
        metadata, bits = reference.decode_metadata(*args, **options)
        if status is not None:
            status |= bits
        return metadata

    oracle = SimpleNamespace(**{**vars(reference), "decode_metadata": decode_metadata})
    assert run_sessions(ROOT / "docs" / "worked_example.md", oracle).attempted > 40


def test_worked_example_calls_every_operator():
    text = (ROOT / "docs" / "worked_example.md").read_text()
    assert [name for name in OPERATORS if f"ckv.{name}(" not in text] == []


@pytest.mark.parametrize("page", [page for page in PAGES if PROGRAM.search(page.read_text())], ids=name_of)
def test_programs_print_what_the_page_shows(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a program may write files, and accept its own goldens
    monkeypatch.setenv("EXPECTTEST_ACCEPT", "1")
    names: dict[str, object] = {}
    for program, shown in PROGRAM.findall(page.read_text()):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(program, str(page), "exec"), names)
        assert printed.getvalue() == shown


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    links = [link for link in LINK.findall(page.read_text()) if not link[0].startswith(("http://", "https://"))]
    assert [link for link, _ in links if not (page.parent / link).exists()] == []
    inside = [(page.parent / link if link else page, anchor) for link, anchor in links if anchor]
    assert [(name_of(to.resolve()), anchor) for to, anchor in inside if anchor not in anchors_of(to)] == []


def anchors_of(page: Path) -> set[str]:
    """What a heading is linked by: its letters, digits and hyphens in lower case."""
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in HEADING.findall(page.read_text())}


def test_every_operator_has_a_page_that_names_its_arguments():
    missing = {}
    for name in [*OPERATORS, "update_metadata"]:
        page = ROOT / "docs" / "ops" / f"{name}.md"
        text = page.read_text() if page.exists() else ""
        absent = [arg for arg in inspect.signature(getattr(ckv, name)).parameters if f"`{arg}" not in text]
        missing |= {name: absent} if absent else {}
    assert missing == {}


def test_readme_lists_every_public_function():
    readme = (ROOT / "README.md").read_text()
    assert [name for name in FUNCTIONS if f"`{name}`" not in readme] == []


def test_every_public_name_has_a_docstring():
    public = {name: getattr(ckv, name) for name in ckv.__all__}
    documented = {name for name, value in public.items() if not callable(value) or value.__doc__}
    assert set(public) - documented == set()
