"""The benchmark: ours beside the published designs, in one process, every claim of docs/benchmarks.md in one file.

python -m compiled_kv.bench --quick      a corner, on any machine
python -m compiled_kv.bench              the whole of it, on a CUDA device
python -m compiled_kv.bench --full       every cell, in chunks that can be resumed
"""
