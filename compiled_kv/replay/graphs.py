"""A decode step captured once for each of a few batch sizes, and replayed for any batch up to the largest.

    step = DecodeGraphs(decode_step, buffers, batch_sizes=[1, 2, 4, 8])
    logits = step(DecodeBatch(rows=[3, 1, 5], seq_lens=[70, 5, 9], generations=[0, 2, 0]))     the graph of 4 rows

`decode_step(buffers, batch_size, *args)` calls `buffers.metadata(batch_size)` and whatever follows from it. Live rows
are counted on the device; what the step returns belongs to the graph and holds until its next replay. On the CPU the
same class runs the compiled step, and holds its caller to the same rules; only outputs are not overwritten there.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from compiled_kv.batches import DecodeBatch, refuse_batch
from compiled_kv.buffers import DecodeBuffers
from compiled_kv.checks import check_int
from compiled_kv.replay.frozen import AFTER_WARM_UP, UNDER_CAPTURE, Frozen, Places, refuse_cold_start
from compiled_kv.replay.mailbox import Mailbox
from compiled_kv.replay.steps import check_callable, compiled, name_of
from compiled_kv.replay.watch import refuse_host_read

NOBODY = DecodeBatch(rows=(), seq_lens=(), generations=())


class DecodeGraphs:
    """`decode_step` for every batch up to the largest of `batch_sizes`.

    Args:
        decode_step: called as decode_step(buffers, batch_size, *args, **kwargs); eager, or compiled by torch.compile
            (not with a mode that captures by itself).
        buffers: what it reads its batch from.
        batch_sizes: the buckets; a batch is padded to the smallest that holds it.
        args, kwargs: what else the step takes. They are frozen: later calls pass the same values, and tensors at the
            same addresses, or nothing, which means these.
        null_pages: views of the null pages of K/V pools, put back as they were after warm-up and capture.
        backend: what compiles an eager step on the CPU; None leaves it eager. On CUDA a step is captured as it is.

    Attributes:
        served: batches run so far; on CUDA each was one replay.

    Raises:
        ValueError: no bucket, or one that is larger than the buffers.
        TypeError: `decode_step` cannot be called.
        RuntimeError: under capture, or on the CPU in a second run, the step met for the first time what has to be
            compiled, or a compiler failed at a line that reads a tensor on the host; the text names it.
    """

    def __init__(
        self, decode_step: Callable[..., Any], buffers: DecodeBuffers, batch_sizes: Sequence[int],
        args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *,
        null_pages: Sequence[Tensor] = (), backend: str | None = "inductor",
    ) -> None:  # fmt: skip
        check_callable(decode_step)
        if not isinstance(buffers, DecodeBuffers):
            raise TypeError(f"buffers must be DecodeBuffers, got {type(buffers).__name__}")
        for index, page in enumerate(null_pages):
            if not isinstance(page, Tensor):
                raise TypeError(f"null_pages[{index}] must be a tensor, got {type(page).__name__}")
        if not isinstance(batch_sizes, Iterable):
            raise TypeError(f"batch_sizes must be a list of ints, got {type(batch_sizes).__name__}")
        self.batch_sizes = sorted(set(batch_sizes))
        for index, size in enumerate(self.batch_sizes):
            check_int(f"batch_sizes[{index}]", size, 1, buffers.max_batch_size)
        if not self.batch_sizes:
            raise ValueError("batch_sizes must hold at least one size, got none")
        self.buffers, self.args, self.kwargs = buffers, tuple(args), dict(kwargs or {})
        self.on_cuda = buffers.inputs.device.type == "cuda"
        self.step = decode_step if self.on_cuda or backend is None else compiled(decode_step, backend)
        self.served, largest = 0, self.batch_sizes[-1]
        self._bucket = [next(size for size in self.batch_sizes if size >= n) for n in range(largest + 1)]
        self._graphs: dict[int, Any] = {}
        self._outputs: dict[int, Any] = {}
        self._mailbox: Mailbox | None = None
        self._frozen = Frozen(decode_step, self.args, self.kwargs)
        before = [page.clone() for page in null_pages]
        with torch.no_grad():
            self._prepare()
        for page, values in zip(null_pages, before):
            page.copy_(values)
        self._places = Places(buffers)

    def __call__(self, batch: DecodeBatch, *args: Any, **kwargs: Any) -> Any:
        """Load `batch` and run the step of the smallest bucket that holds it.

        Returns:
            What the step returned for that bucket: on CUDA the graph's own tensors, overwritten by its next replay.

        Raises:
            ValueError, TypeError: the batch or an argument is not what the graph was captured for; the text names it.
        """
        try:
            size = len(batch.rows)
        except (AttributeError, TypeError):
            refuse_batch(batch)
            raise
        if size >= len(self._bucket):
            largest = self.batch_sizes[-1]
            raise ValueError(f"batch.rows must hold at most {largest} requests, the largest bucket, got {size}")
        self._places.check()
        if args or kwargs:
            self._frozen.check(args, kwargs, self._outputs)
        return self._run(self.buffers.load(batch) if self._mailbox is None else self._send(batch, self._mailbox))

    def replay(self, size: int, *args: Any, **kwargs: Any) -> Any:
        """Run the step for what is in the buffers already, by the graph of the smallest bucket that holds `size`.

        How many rows are live, `num_reqs` on the device says: `size` picks the bucket, and leaves nobody out.

        Args:
            size: the requests that were loaded, or more where rows were added on the device.
            args, kwargs: as when called.

        Raises:
            ValueError: `size` is beyond the largest bucket, or below what was loaded; or as when called.
        """
        check_int("size", size, 0, self.batch_sizes[-1])
        if size < self.buffers.loaded:
            raise ValueError(
                f"size must be at least the {self.buffers.loaded} requests that were loaded, got {size}: to leave some "
                "out, load a batch without them"
            )
        self.buffers.check_stream()
        self._places.check()
        if args or kwargs:
            self._frozen.check(args, kwargs, self._outputs)
        return self._run(size)

    @property
    def captured(self) -> int:
        """CUDA graphs captured: one a bucket; none on the CPU."""
        return len(self._graphs)

    def _send(self, batch: DecodeBatch, mailbox: Mailbox) -> int:
        """Load the batch into the mailbox, for the next replay to take; through the buffers, whose `load` may be a
        caller's own."""
        attributes = self.buffers.__dict__  # a module takes long to set an attribute
        ring = attributes["_ring"]
        attributes["_ring"] = mailbox
        try:
            return self.buffers.load(batch)
        except BaseException:
            mailbox.deliver()
            raise
        finally:
            attributes["_ring"] = ring

    def _run(self, size: int) -> Any:
        bucket = self._bucket[size]
        self.served += 1
        if self._mailbox is not None:
            self._mailbox.replay(self._graphs[bucket])
        else:
            with torch.no_grad():
                self._outputs[bucket] = self.step(self.buffers, bucket, *self.args, **self.kwargs)
        return self._outputs[bucket]

    def _prepare(self) -> None:
        """Warm every bucket up, then capture each, largest first; no row is live, so that nothing real is written."""
        self.buffers.reset()
        self.buffers.load(
            NOBODY._replace(**{name: () for name in ("q_lens", "slots") if getattr(self.buffers, name) is not None})
        )
        sizes = self.batch_sizes[::-1]
        if self.on_cuda:
            with torch.cuda.device(self.buffers.inputs.device):
                self._capture(sizes)
        else:
            self._compile(sizes)
        self.buffers.reset()

    def _compile(self, sizes: Sequence[int]) -> None:
        for size in sizes:
            args = (self.buffers, size, *self.args)
            try:
                self.step(*args, **self.kwargs)
            except RuntimeError as error:
                refuse_host_read(name_of(self.step), self.step, error, args, self.kwargs)
                raise
        for size in sizes:
            with refuse_cold_start(name_of(self.step), AFTER_WARM_UP):
                self._outputs[size] = self.step(self.buffers, size, *self.args, **self.kwargs)

    def _capture(self, sizes: Sequence[int]) -> None:
        side, home = torch.cuda.Stream(), torch.cuda.current_stream()
        self._mailbox = mailbox = self.buffers.new_ring(Mailbox)
        side.wait_stream(home)
        with torch.cuda.stream(side):
            mailbox.take()
            for size in (*sizes, *sizes):
                self.step(self.buffers, size, *self.args, **self.kwargs)
        home.wait_stream(side)
        torch.cuda.synchronize()
        memory = torch.cuda.graph_pool_handle()
        with _no_collection():
            for size in sizes:
                graph = torch.cuda.CUDAGraph()
                cold = refuse_cold_start(name_of(self.step), UNDER_CAPTURE)
                with cold, torch.cuda.graph(graph, pool=memory, stream=side):
                    mailbox.take()
                    self._outputs[size] = self.step(self.buffers, size, *self.args, **self.kwargs)
                self._graphs[size] = graph
        mailbox.restart()
        torch.cuda.synchronize()


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage is collected inside: an older graph that died in a cycle may not be freed under capture."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
