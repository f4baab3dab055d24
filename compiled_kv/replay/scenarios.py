"""What a replay is checked with: named sequences of joins, leaves, swaps, forks, evictions and steps.

    story(serving)                     eight rows, one ends, pages are crossed, five live, one live, eight new ones
    walk(serving, steps, seed)         a seeded random walk
    trace(serving, lengths, steps)     requests of a trace in order, each for as many steps as it generates tokens

A scenario is data: its events can be cut short, thinned out and printed, and any part of one is a scenario.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from compiled_kv.layout import KVLayout, ceil_div
from compiled_kv.replay.serving import Serving


class Event(NamedTuple):
    """A method of `Scheduler` and its arguments."""

    what: str
    a: int = 0
    b: int = 0

    def __str__(self) -> str:
        return f"{self.what} {self.a}" + (f" {self.b}" if self.b else "")


@dataclass(frozen=True)
class Scenario:
    """A name, what is served, and the events."""

    name: str
    serving: Serving
    events: tuple[Event, ...]

    def __str__(self) -> str:
        """One line an event, as short as it can be read; `parse_events` reads it back."""
        return "\n".join(map(str, self.events))

    @property
    def steps(self) -> int:
        """How many of the events are steps."""
        return sum(event.what == "step" for event in self.events)

    def first(self, steps: int) -> Scenario:
        """The same up to and including its `steps`-th step."""
        ends = [index + 1 for index, event in enumerate(self.events) if event.what == "step"]
        return self if steps > len(ends) else replace(self, events=self.events[: ([0, *ends])[steps]])


def parse_events(text: str) -> tuple[Event, ...]:
    """The events of a printed scenario.

    Raises:
        ValueError: a line is no event.
    """
    events = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if words and (words[0] not in EVENTS or len(words) > 3 or not all(w.isdigit() for w in words[1:])):
            raise ValueError(f"line {number} must be one of {', '.join(EVENTS)} and up to two numbers, got {line!r}")
        if words:
            events.append(Event(words[0], *map(int, words[1:])))
    return tuple(events)


EVENTS = ("join", "finish", "swap", "preempt", "fork", "step")
MODES = ("decode", "verify", "extend")


def serving(
    mode: str = "decode", *, page_size: int = 16, max_context_len: int = 512, max_batch_size: int = 8, drafts: int = 4,
    window: int | None = None, page_map: bool = False, fullness: float = 0.6,
) -> Serving:  # fmt: skip
    """Pools that hold `fullness` of what a full batch of longest requests would take, so that pages run short at times.

    Raises:
        ValueError: the mode is unknown.
    """
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    layout = KVLayout(page_size, max_context_len, max_draft_tokens=drafts if mode == "verify" else 0, window=window)
    pages = max(int(fullness * layout.max_num_pages * max_batch_size), layout.max_num_pages + 2) + 1
    swa_pages = 0
    if window is not None:
        seen = min(ceil_div(window, page_size) + 2, layout.max_num_pages)
        swa_pages = layout.max_num_pages + (seen + ceil_div(layout.max_draft_tokens, page_size)) * max_batch_size + 2
    return Serving(layout, max_batch_size, pages, min(swa_pages, pages), mode, page_map=page_map)


def story(serving: Serving) -> Scenario:
    """Eight live; request 2 ends and the last row moves into its place; rows 0 and 5 cross a page; five live;
    one live; eight again with new requests."""
    page = serving.layout.page_size
    eight = [Event("join", length) for length in (page - 2, 3, 5, 4, 2, page - 3, 7, 2 * page)]
    events = [*eight, Event("step", 1), Event("finish", 2), Event("step", 2), Event("step", 3), Event("step", 4)]
    events += [Event("finish", 6), Event("finish", 3), Event("step", 5)]
    events += [Event("finish", 0)] * 4 + [Event("step", 6)]
    events += [Event("join", length) for length in (2, 3 * page, 1, page, page + 1, 9, 4)] + [
        Event("step", 7),
        Event("step", 8),
    ]
    return Scenario("story", serving, tuple(events))


def walk(serving: Serving, steps: int, seed: int = 0) -> Scenario:
    """`steps` steps with random events between them, now few requests, now many; lengths gather at the edges of
    pages. One of a page's length joins ahead of the first step, so that the shortest walk has a request."""
    rng, page, busy = random.Random(seed), serving.layout.page_size, 1
    events = [Event("join", page)]
    others: list[Callable[[], Event]] = [
        lambda: Event("join", max(rng.randrange(1, 6) * page + rng.choice((-1, 0, 1)), 1)),
        lambda: Event("join", rng.randrange(1, serving.layout.max_context_len)),
        lambda: Event("finish", rng.randrange(16)),
        lambda: Event("swap", rng.randrange(16), rng.randrange(16)),
        lambda: Event("preempt", rng.randrange(16)),
        lambda: Event("fork", rng.randrange(16)),
    ]
    for step in range(steps):
        if step % 40 == 0:
            busy = rng.choice((1, 3, 9))
        while rng.random() < 0.3:
            events.append(rng.choices(others, weights=(2 * busy, busy, 12, 4, 2, 4))[0]())
        events.append(Event("step", rng.randrange(1 << 16)))
    return Scenario(f"walk, seed {seed}", serving, tuple(events))


def trace(serving: Serving, lengths: Iterable[tuple[int, int]], steps: int) -> Scenario:
    """Requests of (prompt, generated) tokens join in order as places come free and stay as long as they generate.

    Lengths are scaled so that the longest fits the context bound, and the pools cut to less than a full batch of
    average requests takes, so that some are evicted. The trace begins anew when it is used up.
    """
    requests = [(max(prompt, 1), max(generated, 1)) for prompt, generated in lengths]
    if not requests:
        raise ValueError("lengths must hold at least one request, got none")
    longest = max(map(sum, requests))
    scale = min(1.0, (serving.layout.max_context_len - 1) / longest)
    scaled = [(max(int(prompt * scale), 1), max(int(generated * scale), 1)) for prompt, generated in requests]
    # Somewhat more than can be served: a short queue makes up for what comes in lumps.
    rate = 1.5 * serving.max_batch_size * len(scaled) / sum(left for _, left in scaled)
    layout = serving.layout
    average = sum(layout.num_pages(sum(request)) for request in scaled) / len(scaled)
    least = max(layout.max_num_pages + 2, int(0.75 * serving.max_batch_size * average)) + 1
    pages = min(serving.num_pages, least)
    serving = replace(serving, num_pages=pages, num_swa_pages=min(serving.num_swa_pages, pages))
    events, sent, due = [], 0, float(serving.max_batch_size)
    for step in range(steps):
        while sent < due:
            events.append(Event("join", *scaled[sent % len(scaled)]))
            sent += 1
        events.append(Event("step", step))
        due += rate
    return Scenario("trace", serving, tuple(events))


def shorter(events: Sequence[Event], fails: Callable[[tuple[Event, ...]], bool], attempts: int) -> tuple[Event, ...]:
    """The shortest events found that still fail, in at most `attempts` tries: the end of them, then parts left out,
    then smaller numbers."""
    left = attempts

    def tried(candidate: Sequence[Event]) -> bool:
        nonlocal left
        left -= 1
        return left >= 0 and fails(tuple(candidate))

    best, size = list(events), 4
    while size < len(best):
        if tried(best[-size:]):
            best = best[-size:]
            break
        size *= 4
    size = max(len(best) // 2, 1)
    while size >= 1 and left > 0:
        begin = 0
        while begin < len(best) and left > 0:
            candidate = best[:begin] + best[begin + size :]
            if tried(candidate):
                best = candidate
            else:
                begin += size
        size = size // 2
    first, second = 0, 1
    while first < len(best) and left > 0:  # a join and the finish that belongs to it go together
        candidate = [event for index, event in enumerate(best) if index not in (first, second)]
        if second < len(best) and tried(candidate):
            best, first, second = candidate, 0, 1
        else:
            first, second = (first, second + 1) if second + 1 < len(best) else (first + 1, first + 2)
    for index, event in enumerate(best):
        for smaller in (event._replace(a=0), event._replace(a=1), event._replace(a=event.a // 2), event._replace(b=0)):
            candidate = [*best[:index], smaller, *best[index + 1 :]]
            if smaller < best[index] and tried(candidate):
                best = candidate
                break
    return tuple(best)
