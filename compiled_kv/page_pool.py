"""Who holds which page of a pool, on the host."""

from __future__ import annotations


class PagePool:
    """Pages 1 to num_pages - 1 with a count of holders each; page 0 is the null page and never handed out.

    Attributes:
        taken: pages handed out over time; more than the pool has means that pages were reused.
    """

    def __init__(self, num_pages: int) -> None:
        self.free = list(range(num_pages - 1, 0, -1))
        self.holders = [0] * num_pages
        self.taken = 0

    def take(self) -> int:
        """A free page, held once."""
        page = self.free.pop()
        self.taken += 1
        self.hold(page)
        return page

    def hold(self, page: int) -> None:
        self.holders[page] += 1

    def release(self, page: int) -> bool:
        """Let go of `page` once; True if nobody holds it any more."""
        self.holders[page] -= 1
        if not self.holders[page]:
            self.free.append(page)
        return not self.holders[page]
