"""Graphs of a callable, on a real device or for one that this machine lacks; what they hold, counted and rendered."""

from compiled_kv.tracing.fakes import host
from compiled_kv.tracing.graphs import Graphs, capture, trace

__all__ = ["Graphs", "capture", "host", "trace"]
