"""CUDA-graph capture by batch bucket, replay, and the check against Python ints."""

from compiled_kv.replay.check import ReplayFault, check_replay
from compiled_kv.replay.graphs import DecodeGraphs

__all__ = ["DecodeGraphs", "ReplayFault", "check_replay"]
