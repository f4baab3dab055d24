"""The kernel with which a captured graph takes its own inputs out of pinned memory of the host."""

from __future__ import annotations

from compiled_kv.launch import dependent_launch, kernel, tl


@kernel
def take_line_kernel(
    lines_ptr, taken_ptr, inputs_ptr, line_stride, capacity, LINES: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Copy line `taken % LINES` to `inputs`: a size, then that many of its `capacity` numbers; a size of 0 leaves all.

    Each program counts for itself how many lines it has taken, so that none waits for another.
    """
    if PDL:
        dependent_launch()
    part = tl.program_id(0).to(tl.int64)
    taken = tl.load(taken_ptr + part)
    line_ptr = lines_ptr + taken % LINES * line_stride
    at = part * BLOCK + tl.arange(0, BLOCK)
    # Volatile: the host writes these between launches. Read whole, so that the size costs no second way to the host.
    size = tl.load(line_ptr, volatile=True)
    numbers = tl.load(line_ptr + 1 + at, mask=at < capacity, other=0, volatile=True)
    tl.store(inputs_ptr + at, numbers, mask=at < size)
    tl.store(taken_ptr + part, taken + 1)
