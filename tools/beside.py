"""Time this package's operators as several trees have them, in turn in one process.

    python3 tools/beside.py HEAD . .,FINE_PARTS=264 --match page1-      what a change, and a constant, are worth
    python3 tools/beside.py HEAD . --cell 64-128K-128K-page1-row-uniform --contender ours-clear

A tree is a revision of git or a folder, and may name constants that a copy of it has another value of. Each is copied
under a name of its own, so that all can be imported. Ratios are over the first tree's, taken within a round.
"""

from __future__ import annotations

import dataclasses
import importlib
import io
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import click
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from compiled_kv.bench.cells import QUICK, Cell, default_cells, full_cells  # noqa: E402
from compiled_kv.bench.inputs import make_inputs  # noqa: E402
from compiled_kv.bench.run import sets_of, take_turns, to_time  # noqa: E402
from compiled_kv.bench.timing import paired_ratio, summary  # noqa: E402

PACKAGE = "compiled_kv"
OURS = ("ours", "ours-clear", "incremental")


def copied(tree: str, name: str, folder: Path) -> None:
    """Put `tree`'s package under `folder` as `name`, with the constants that the tree names."""
    revision, *constants = tree.split(",")
    for path, text in sources(revision).items():
        target = folder / name / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(re.sub(rf"\b{PACKAGE}\b", name, text))
    for constant in constants:
        key, _, value = constant.partition("=")
        if not sum(replaced(path, key, value) for path in (folder / name).rglob("*.py")):
            raise click.UsageError(f"{tree}: no file begins a line with `{key} = `")


def replaced(path: Path, key: str, value: str) -> int:
    text, count = re.subn(rf"^{key} = .*$", f"{key} = {value}", path.read_text(), flags=re.MULTILINE)
    if count:
        path.write_text(text)
    return count


def sources(revision: str) -> dict[str, str]:
    """Every Python file of the package, by its path in it."""
    folder = Path(revision) / PACKAGE
    if folder.is_dir():
        return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.py")}
    found = subprocess.run(["git", "archive", revision, PACKAGE], cwd=ROOT, capture_output=True, check=False)
    if found.returncode:
        said = found.stderr.decode().strip()
        raise click.UsageError(f"{revision} is neither a folder with {PACKAGE}/ nor a revision: {said}")
    with tarfile.open(fileobj=io.BytesIO(found.stdout)) as archive:
        files = {member.name: archive.extractfile(member) for member in archive if member.name.endswith(".py")}
        return {name.removeprefix(f"{PACKAGE}/"): file.read().decode() for name, file in files.items() if file}


def times(
    cell: Cell, trees: dict[str, str], wanted: tuple[str, ...], device: torch.device, rounds: int
) -> dict[tuple[str, str], list[float]]:
    """Microseconds a call, by tree and contender; each is checked before anything is timed."""
    given = make_inputs(cell, device, sets_of(cell, device))
    first, timed = next(iter(trees)), {}
    for tree, name in trees.items():
        layout = importlib.import_module(name).KVLayout(**dataclasses.asdict(given.layout))
        own = dataclasses.replace(given, layout=layout)
        check = importlib.import_module(f"{name}.bench.expected").check
        running = importlib.import_module(f"{name}.bench.contenders").contenders(own)
        for each in wanted:
            if each in running and (each in OURS or tree == first):
                check(own, each, running[each], 0)
                timed[tree, each] = to_time(running[each], own)
    take_turns(timed, device, rounds)
    return {key: each.samples for key, each in timed.items()}


@click.command()
@click.argument("trees", nargs=-1, required=True)
@click.option("--contender", "wanted", multiple=True, default=OURS, help="Of every tree ours, of the first all others.")
@click.option("--cell", "names", multiple=True, help="Cells by name.")
@click.option("--match", help="And those of a default run whose name contains this.")
@click.option("--rounds", default=25, show_default=True)
@click.option("--quick", is_flag=True, help="Two small cells, on the CPU.")
def main(
    trees: tuple[str, ...], wanted: tuple[str, ...], names: tuple[str, ...], match: str | None, rounds: int, quick: bool
) -> None:
    if not quick and not torch.cuda.is_available():
        raise click.UsageError("timings need a CUDA device; --quick runs a corner on any machine")
    device = torch.device("cpu" if quick else "cuda")
    chosen = [cell for cell in default_cells() if match is not None and match in cell.name]
    chosen += [cell for cell in full_cells() if cell.name in names and cell not in chosen]
    if not (quick or chosen) or len(set(trees)) < len(trees) or set(names) - {cell.name for cell in chosen}:
        raise click.UsageError("give each tree once, and cells that there are: --cell NAME, or --match TEXT")
    with tempfile.TemporaryDirectory() as folder:
        sys.path.insert(0, folder)
        known = {tree: f"tree{index}_{PACKAGE}" for index, tree in enumerate(trees)}
        for tree, name in known.items():
            copied(tree, name, Path(folder))
        for cell in QUICK if quick else chosen:
            show(cell.name, trees[0], times(cell, known, wanted, device, rounds))
            if device.type == "cuda":
                torch.cuda.empty_cache()


def show(cell: str, first: str, found: dict[tuple[str, str], list[float]]) -> None:
    for (tree, each), samples in found.items():
        line = f"{cell:40} {each:22} {tree:28} {summary(samples)['median']:8.3f} us"
        if tree != first:
            ratio = paired_ratio(samples, found[first, each])
            line += f"  {ratio['median']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"
        click.echo(line)


if __name__ == "__main__":
    main()
