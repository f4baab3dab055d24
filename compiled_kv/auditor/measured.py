"""What a step was seen to do on a real device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Wait:
    """A synchronization that the sync debug mode reported; `file` is "" in code that a compiler wrote."""

    file: str
    line: int


@dataclass(frozen=True)
class Measured:
    """One step on a device; None says that it could not be measured, and `failures` why, by what was tried.

    Fields:
        device, versions: what it ran on.
        eager_waits, waits: synchronizations of an eager and of a compiled call; `waits_raised` is what the sync debug
            mode raised in a compiled call, "" for nothing.
        kernels, memory: kernels that the profiler saw in one compiled call, and copies and fills, by name.
        graphs, recompiles: graphs compiled in the first call, and guards that failed in later ones.
        replayed, skips: CUDA graphs replayed in one call under mode="reduce-overhead", and why others were skipped.
        captured: whether a compiled call was captured by hand and replayed; `not_captured` is what that raised.
    """

    device: str
    versions: str
    eager_waits: tuple[Wait, ...] | None = None
    waits: tuple[Wait, ...] | None = None
    waits_raised: str | None = None
    kernels: dict[str, int] | None = None
    memory: dict[str, int] | None = None
    graphs: int | None = None
    recompiles: tuple[str, ...] | None = None
    replayed: int | None = None
    skips: tuple[str, ...] | None = None
    captured: bool | None = None
    not_captured: str = ""
    failures: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Measured:
        """What `dataclasses.asdict` made of one, after a journey through JSON."""
        known = {each.name: values[each.name] for each in fields(cls) if each.name in values}
        for name in ("eager_waits", "waits"):
            if known.get(name) is not None:
                known[name] = tuple(Wait(**each) for each in known[name])
        for name in ("recompiles", "skips"):
            if known.get(name) is not None:
                known[name] = tuple(known[name])
        return cls(**known)

    @property
    def waited(self) -> bool:
        """Whether the host was seen to wait in a compiled call."""
        return bool(self.waits or self.waits_raised)

    def rows(self) -> dict[str, str]:
        """What was measured, in words, by the question it answers."""
        return {
            "target": f"{self.device}, {self.versions}",
            "graphs": known(self.graphs),
            "kernel launches": named(self.kernels),
            "copies and fills": named(self.memory),
            "host waits": f"{count(self.waits)} in a compiled step, {count(self.eager_waits)} in an eager one",
            "recompiles": count(self.recompiles),
            "reduce-overhead": self.reduced(),
            "captured by hand": self.by_hand(),
            **{f"failed: {part}": text for part, text in self.failures.items()},
        }

    def reduced(self) -> str:
        if self.replayed is None:
            return f"unknown: {self.failures.get('reduce-overhead', 'it was not tried')}"
        skipped = "".join(f"; skipped: {reason}" for reason in self.skips or ())
        return f"{self.replayed} replayed a step{skipped}"

    def by_hand(self) -> str:
        if self.captured is None:
            return f"unknown: {self.not_captured or 'it was not tried'}"
        return "captured and replayed" if self.captured else f"not captured: {self.not_captured}"


def known(value: object) -> str:
    return "unknown" if value is None else str(value)


def count(items: Sequence[object] | None) -> str:
    return "unknown" if items is None else str(len(items))


def named(counted: Mapping[str, int] | None) -> str:
    if counted is None:
        return "unknown"
    names = (name if times == 1 else f"{name} x{times}" for name, times in counted.items())
    return f"{sum(counted.values())}: {', '.join(names)}" if counted else "none"
