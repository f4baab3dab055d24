"""Hazards inserted at random lines of real models' code: the changed method is written to a file and compiled."""

from __future__ import annotations

import ast
import inspect
import random
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

# Statements by rule; `t` is a floating-point tensor of the method.
HAZARDS: dict[str, tuple[str, ...]] = {
    "host-read": (
        "{t} = {t} + int({t}.argmax())",
        "{t} = {t} * 2 if {t}.sum() > 0 else {t}",
        "{t} = {t} + max({t}.flatten()[:2].long().tolist())",
        "{t} = {t}.cpu().to({t}.device)",
        "{t} = {t}[..., : {t}.argmax() + 1].sum() + {t}",
    ),
    "data-dependent-shape": (
        "{t} = {t} + {t}.nonzero().shape[0]",
        "{t} = {t} + {t}[{t} > 0].sum()",
        "{t} = {t} + torch.unique({t}.flatten().long()).numel()",
        "{t} = {t} + torch.masked_select({t}, {t} > 0).sum()",
    ),
    "host-to-device-copy": (
        "{t} = {t} + torch.tensor([1.0, 2.0], device={t}.device)[0]",
        "{t} = {t} * torch.tensor(0.5, device={t}.device)",
        "{t} = {t} + torch.arange(1).to({t}.device)",
    ),
    "cpu-tensor": ("{t} = {t} * torch.ones(())",),
    "graph-break": ("print(end='')", "torch._dynamo.graph_break()"),
    "unsafe-under-capture": ("torch.cuda.synchronize()", "torch.cuda.empty_cache()", "torch.manual_seed(0)"),
    "hidden-copy": ("w = {t}.new_zeros(16).int(); bump_pair_out(w[:4] + 1, w[4:8], w[8:12]); {t} = {t} + w[5]",),
    "aliased-mutation": ("w = {t}.new_zeros(8).int(); bump_out(w, w); {t} = {t} + w[0]",),
    "mutated-input": ("{argument}.add_(0); {t} = {t} + {argument}.sum()",),
    "recompile": ("self.calls = getattr(self, 'calls', 0) + 1; {t} = {t} * self.calls",),
    "output-fed-back": ("self.last = {t}.sum() + getattr(self, 'last', 0.0); {t} = {t} + self.last",),
}
TENSORS = ("hidden_states", "hidden", "attn_output", "residual", "x")


class Site(NamedTuple):
    """A place in a method: insert before this line of its source, at this indent; the tensor's name is known there."""

    line: int
    indent: int
    tensor: str


def sites(method: Any) -> list[Site]:
    """Every statement of a method that each call reaches, after a floating-point tensor has a name."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(method)))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    known = {argument.arg for argument in tree.args.args}
    found, statements = [], list(reached(tree.body))
    for index, statement in enumerate(statements):
        live = (name for name in TENSORS if name in known and is_read_next(name, statements[index:]))
        if tensor := next(live, None):
            found.append(Site(statement.lineno, statement.col_offset, tensor))
        known |= {node.id for node in names_in(statement) if isinstance(node.ctx, ast.Store)}
    return found


def is_read_next(name: str, statements: list[ast.stmt]) -> bool:
    """Whether the next statement that mentions `name` reads it: otherwise what is done to it before is dead code."""
    for statement in statements:
        uses = [node.ctx for node in names_in(statement) if node.id == name]
        if uses:
            return any(isinstance(use, ast.Load) for use in uses)
    return False


def names_in(statement: ast.stmt) -> list[ast.Name]:
    return [node for node in ast.walk(statement) if isinstance(node, ast.Name)]


def reached(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue  # a docstring
        yield statement
        if isinstance(statement, ast.For):
            yield from reached(statement.body)


def mutate(method: Any, rule: str, argument: str | None, path: Path, pick: random.Random) -> tuple[Any, int]:
    """The method with a hazard in it, compiled from the file at `path`, and the hazard's line there."""
    plain = inspect.unwrap(method)
    lines = textwrap.dedent(inspect.getsource(plain)).splitlines()
    lines = ["#" if line.startswith("@auto_docstring") else line for line in lines]  # it wants a class around it
    site = pick.choice(sites(method))
    statement = pick.choice(HAZARDS[rule]).format(t=site.tensor, argument=argument)
    lines.insert(site.line - 1, " " * site.indent + statement)
    path.write_text("from __future__ import annotations\n" + "\n".join(lines) + "\n")
    names = dict(plain.__globals__)
    exec(compile(path.read_text(), str(path), "exec"), names)
    return names[plain.__name__], site.line + 1
