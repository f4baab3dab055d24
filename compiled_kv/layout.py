"""The frozen host numbers of a paged KV cache, and the one place that turns lengths into capacities.

    layout = KVLayout(page_size=64, max_context_len=131072, max_draft_tokens=4, window=None)
    layout.max_num_pages -> 2049        ceil((131072 + 4) / 64)
    layout.max_seqlen_k  -> 131076      what attention calls ask for as `max_seqlen_k`
    layout.check([70, 131077]) -> ValueError: lengths[1]=131077 needs 2049 pages ... has 131076 tokens

Words used all over the package, each with one meaning:

    slot        where one token's K/V lies in a pool of tokens; slot 0 is the null slot, -1 means none
    page        page_size consecutive slots; page = slot // page_size; page 0 is the null page, -1 means none
    row         of a pool: one request; of a batch: one entry, which names its pool row
    capacity    a bound known on the host (here); active: a live count known only on the device
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

INT32_MAX = 2**31 - 1


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class KVLayout:
    """Static shape of a paged KV cache; every field is a host int, so nothing here is ever read from a device.

    Args:
        page_size: tokens a page, at least 1.
        max_context_len: committed tokens a request may reach.
        max_draft_tokens: tokens beyond that which a speculative step may add before they are accepted.
        window: keys a sliding-window query sees, itself included (a query at p sees p-window+1 .. p); None for full
            attention.
    """

    page_size: int
    max_context_len: int
    max_draft_tokens: int = 0
    window: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("page_size", 1), ("max_context_len", 0), ("max_draft_tokens", 0), ("window", 1)):
            value = getattr(self, name)
            if name == "window" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name} must be an int, got {type(value).__name__}")
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
            if value > INT32_MAX:
                raise ValueError(f"{name} must fit in int32, got {value}")
        if self.max_seqlen_k > INT32_MAX:
            raise ValueError(f"max_context_len + max_draft_tokens must fit in int32, got {self.max_seqlen_k}")

    @property
    def max_seqlen_k(self) -> int:
        """The longest sequence attention can meet, in tokens."""
        return self.max_context_len + self.max_draft_tokens

    @property
    def max_num_pages(self) -> int:
        """Columns of a page table that holds the longest sequence."""
        return ceil_div(self.max_seqlen_k, self.page_size)

    def num_pages(self, length: int) -> int:
        """Pages that `length` tokens occupy."""
        return ceil_div(length, self.page_size)

    def check(self, lengths: Iterable[int]) -> None:
        """Refuse lengths, known on the host, that this layout cannot hold.

        Raises:
            ValueError: a length is negative or longer than `max_seqlen_k`; it names the entry and both page counts.
        """
        for index, length in enumerate(lengths):
            if length < 0:
                raise ValueError(f"lengths[{index}] must not be negative, got {length}")
            if length > self.max_seqlen_k:
                raise ValueError(
                    f"lengths[{index}]={length} needs {self.num_pages(length)} pages, has {self.max_num_pages} "
                    f"({self.max_seqlen_k} tokens)"
                )
