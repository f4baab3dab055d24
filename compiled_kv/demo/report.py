"""The table at the end: a column a model, and a line for each thing the demo promises."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table

from compiled_kv.demo.serving import Result

LINES: dict[str, Callable[[Result], object]] = {
    "requests": lambda result: len(result.served),
    "tokens": lambda result: result.tokens,
    "tokens equal to the reference": lambda result: result.equal,
    "steps served": lambda result: "\n".join(f"{step.name} {step.served}" for step in result.steps),
    "batch sizes": lambda result: " ".join(map(str, result.steps[0].graphs.batch_sizes)),
    "graphs compiled": lambda result: sum(len(part.graphs) for part in result.parts),
    "CUDA graphs captured": lambda result: sum(step.graphs.captured for step in result.steps),
    "replays served": lambda result: sum(step.served for step in result.steps if step.graphs.captured),
    "graph breaks": lambda result: result.graph_breaks,
    "host reads in the graph": lambda result: sum(part.host_reads for part in result.parts),
    "metadata launches a model's step": lambda result: max(part.metadata_launches for part in result.parts),
    "metadata launches": lambda result: sum(step.metadata_launches * step.served for step in result.steps),
    "drafts accepted": lambda result: _drafts(result),
    "preemptions": lambda result: result.preemptions,
    "pages shared": lambda result: result.shared_pages,
    "pages used / in the pool": lambda result: f"{result.pages_taken} / {result.workload.num_pages - 1}",
    "sliding pages used / in the pool": lambda result: _swa(result),
    "tokens/s": lambda result: f"{result.tokens / result.seconds:.0f}",
}


def show(results: Sequence[Result], console: Console) -> None:
    """Print the table, and below it the verdict: what went wrong, or that nothing did."""
    table = Table(title="compiled_kv demo")
    table.add_column("")
    for result in results:
        table.add_column(result.model, justify="right")
    for label, value in LINES.items():
        table.add_row(label, *(str(value(result)) for result in results))
    console.print(table)
    wrong = [f"{result.model}: {line}" for result in results for line in complaints(result)]
    for line in wrong:
        console.print(line, style="red", markup=False)
    if not wrong:
        equal, tokens = (sum(numbers) for numbers in zip(*((result.equal, result.tokens) for result in results)))
        verdict = f"ok: {equal} of {tokens} tokens are the reference's, and every function is one graph"
        console.print(verdict, style="green")


def complaints(result: Result) -> list[str]:
    """One line for each request whose tokens differ and each step that was not compiled whole."""
    lines = []
    for i, (got, want) in enumerate(zip(result.served, result.expected, strict=True)):
        if got != want:
            at = next((t for t, pair in enumerate(zip(got, want)) if pair[0] != pair[1]), min(len(got), len(want)))
            lines.append(
                f"request {i} differs from token {at} on: {got[at : at + 4]}, the reference has {want[at : at + 4]}"
            )
    for part in result.parts:
        if not part.whole:
            lines.append(
                f"step {part.name}: {len(part.graphs)} graphs, which ran in {part.graph_calls} of {part.calls} calls"
            )
        if part.metadata_launches != 1 or part.host_reads:
            lines.append(f"step {part.name}: {part.metadata_launches} metadata launches, {part.host_reads} host reads")
    for step in result.steps:
        lines += [f"step {name}: called {n} times more than serving takes" for name, n in step.strays.items()]
    if result.graph_breaks:
        lines.append(f"{result.graph_breaks} graph breaks")
    if result.status:
        lines.append(f"status {result.status}: a length or slot was out of bounds")
    return lines


def _drafts(result: Result) -> str:
    return f"{result.drafts_accepted} / {result.drafts_verified}" if result.drafts_verified else "-"


def _swa(result: Result) -> str:
    return f"{result.swa_pages_taken} / {result.workload.num_swa_pages - 1}" if result.workload.num_swa_pages else "-"
