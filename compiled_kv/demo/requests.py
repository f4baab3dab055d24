"""What is asked for, and what is in flight."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from compiled_kv.models.allocator import Holding


class Request(NamedTuple):
    """A prompt, and how many tokens are wanted after it."""

    prompt: list[int]
    new_tokens: int

    @property
    def length(self) -> int:
        """Tokens when it is done."""
        return len(self.prompt) + self.new_tokens


@dataclass
class Running:
    """A request in flight: its tokens so far, how many of them are in the cache, and what it holds."""

    index: int
    request: Request
    tokens: list[int]
    cached: int = 0
    holding: Holding = field(default_factory=lambda: Holding(-1))

    @property
    def pending(self) -> int:
        """Tokens that are known but not in the cache yet."""
        return len(self.tokens) - self.cached

    @property
    def done(self) -> bool:
        return len(self.tokens) >= self.request.length
