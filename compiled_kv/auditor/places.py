"""Which line of the caller's code a node of a graph, or an error of dynamo, comes from."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch
from torch import fx

from compiled_kv.tracing import counts
from compiled_kv.tracing.events import Place, frames_in, of_the_caller

_RUNNING = tuple(str(Path(__file__).parent.parent / part) for part in ("tracing", "replay"))  # parts that call a step


def of_text(text: str) -> Place | None:
    """The innermost frame in a traceback that is neither torch's, Python's nor this package's."""
    return of_the_caller(frames_in(text))


def of_traceback(error: BaseException) -> Place | None:
    """The innermost frame of the caller's that raised `error`; None where a graph did, whose nodes say it better."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    return None if "<eval_with_key>" in frames else of_text(frames)


def of_step(error: BaseException) -> Place | None:
    """The line of the step that raised `error`, which dynamo writes into its own errors; None where no frame is of it,
    as where the step got too few arguments."""
    place = of_text(str(error)) or of_traceback(error)
    return None if place is None or place[0].startswith(_RUNNING) else place


def of_node(node: fx.Node) -> Place:
    """The line that made `node`; where the compiler made it, the line of what it works on."""
    seen, queue = set[fx.Node](), [node]
    while queue:
        current = queue.pop(0)
        if place := of_text(current.meta.get("stack_trace") or ""):
            return place
        seen.add(current)
        queue += [each for each in current.all_input_nodes if each not in seen]
    return ("", 0)


def of_use(node: fx.Node) -> Place:
    """The line that first uses an input; one that asks for its size alone counts where there is no other."""
    users = [each for each in node.meta.get("compiled_kv_users") or node.users if each.meta.get("stack_trace")]
    return next(map(of_node, sorted(users, key=_is_a_size)), ("", 0))


def _is_a_size(node: fx.Node) -> bool:
    return isinstance(counts.value_of(node), int | torch.SymInt | torch.Size)


def base_of(node: fx.Node) -> fx.Node:
    """The input or value that `node` is a view of."""
    while node.op == "call_function" and node.args and isinstance(node.args[0], fx.Node) and _is_view(node):
        node = node.args[0]
    return node


def _is_view(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target.is_view
