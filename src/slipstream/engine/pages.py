"""Page accounting: which pages are free, who shares which, and which hold prefixes worth keeping. No torch.

A page is in use (some requests hold it), cached (nobody holds it, but its content is known by a key and can be taken
up again), or free. Cached pages are given up oldest first when free ones run out.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence


class PageAllocator:
    """Owns the numbers of all pages.

    Args:
        when_lost: called with a page whose content nobody can ask for any more.
    """

    def __init__(self, num_pages: int, when_lost: Callable[[int], object] | None = None) -> None:
        self.num_pages = num_pages
        self._when_lost = when_lost or (lambda page: None)
        self._free = list(range(num_pages - 1, -1, -1))
        self._holders = [0] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_available(self) -> int:
        """Pages that could be allocated now: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_in_use(self) -> int:
        """Pages some request holds."""
        return self.num_pages - self.num_available

    def allocate(self, count: int) -> list[int] | None:
        """Return `count` pages for one holder, or None (and change nothing) if there are not so many."""
        if count > self.num_available:
            return None
        pages = [self._take() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def lookup(self, keys: Iterable[bytes]) -> list[int]:
        """Return the pages of the longest run of known keys from the start, without holding them."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def hold(self, pages: Sequence[int]) -> None:
        """Add a holder to pages found by `lookup`."""
        for page in pages:
            self._cached.pop(page, None)
            self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Drop one holder of each page; a page nobody holds is kept if its content has a key, else freed."""
        for page in reversed(pages):  # a prefix's last page is given up first, so that its first stays useful
            assert self._holders[page] > 0, f"page {page} released by nobody"
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if page in self._key_of:
                    self._cached[page] = None
                else:
                    self._free.append(page)
                    self._when_lost(page)

    def register(self, page: int, key: bytes) -> None:
        """Name a page's content. The first page with a key keeps it; equal content elsewhere stays unnamed."""
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def check(self, held: Sequence[Sequence[int]]) -> None:
        """Assert that every page is free, cached or held, and by just the holders given."""
        expected = [0] * self.num_pages
        for pages in held:
            assert len(set(pages)) == len(pages), "a request holds a page twice"
            for page in pages:
                expected[page] += 1
        assert expected == self._holders, "page holders and requests disagree"
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        for page in range(self.num_pages):
            states = (page in free) + (page in self._cached) + (self._holders[page] > 0)
            assert states == 1, f"page {page} is in {states} states"
            assert (page not in free) or (page not in self._key_of), f"free page {page} has a key"
        assert {page: key for key, page in self._page_of.items()} == self._key_of, "keys and pages disagree"

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        page, _ = self._cached.popitem(last=False)
        del self._page_of[self._key_of.pop(page)]
        self._when_lost(page)
        return page
