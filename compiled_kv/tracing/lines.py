"""Lines of the step's that dynamo would lose while it traces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch


@contextmanager
def lines_of_no_file_kept() -> Iterator[None]:
    """Nodes made by code in no file, as of `python -c`, keep their lines, which dynamo takes for generated code's."""
    from torch._dynamo import output_graph

    before = getattr(output_graph, "uninteresting_files", None)
    if before is None:  # a name of torch's own: where it has another the nodes are told without a line
        yield
        return
    files = before() - {"<string>"}
    with patch.object(output_graph, "uninteresting_files", lambda: files):
        yield
