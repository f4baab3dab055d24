"""Where the demo is: a bar on a terminal, elsewhere a line a phase, and one for each quarter of its tokens.

llama: compiling
llama: serving
llama: serving, 92 of 337 tokens
llama: serving, 171 of 337 tokens
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Follow = Callable[[str, int], None]


@contextmanager
def follow(console: Console, tokens: int, phases: int) -> Iterator[Follow]:
    """Inside, call what this gives with the name of a phase and how many of its `tokens` came; it has `phases` such."""
    if not console.is_terminal:
        yield Lines(tokens, lambda line: console.file.write(f"{line}\n") and console.file.flush())
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=tokens * phases)
        yield lambda what, count: bar.update(task, description=what, advance=count)


class Lines:
    """One line for each new phase, and one whenever another quarter of its tokens is there."""

    def __init__(self, tokens: int, say: Callable[[str], object]) -> None:
        self.tokens, self.say = tokens, say
        self.what, self.done, self.told = "", 0, 0

    def __call__(self, what: str, count: int) -> None:
        if what != self.what:
            self.what, self.done, self.told = what, 0, 0
            self.say(what)
        self.done += count
        quarter = 4 * self.done // max(self.tokens, 1)
        if quarter > self.told:
            self.told = quarter
            self.say(f"{what}, {self.done} of {self.tokens} tokens")
