"""CUDA-graph capture by batch bucket, replay, and the check against Python ints."""

from compiled_kv.replay.check import check_replay
from compiled_kv.replay.graphs import DecodeGraphs
from compiled_kv.replay.player import ReplayFault

__all__ = ["DecodeGraphs", "ReplayFault", "check_replay"]
