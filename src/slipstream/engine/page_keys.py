"""What a page is known by: everything its bits depend on, in one place. No torch.

- The text up to its end, hashed page by page.
- Where prompts and answers are computed in different forms (latent attention: expanded and absorbed, which round
  differently), how much of the text was a prompt. So a page that an answer filled is taken up by the same request
  after it was preempted, and computed anew where the answer has become part of a prompt; prompts take up prompts.
- Where a draft keeps keys, the token after the page, since a draft's key at slot t depends on token t + 1, and whether
  the draft followed the request at all.
- The salt of the request: texts of different salts have no page in common.
"""

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slipstream.engine.request import Request


@dataclass(frozen=True)
class PageKeys:
    """Names the pages of requests.

    Args:
        has_draft: a draft keeps keys in the pages, too.
        two_forms: the target computes the tokens of prompts in another form than those of answers.
    """

    page_size: int
    has_draft: bool
    two_forms: bool

    def first(self, request: Request, count: int) -> list[bytes]:
        """Return the keys of a request's first pages; they are full, and the token after each is known."""
        if len(request.page_keys) < count:
            self._extend(request, count)
        return request.page_keys[:count]

    def _extend(self, request: Request, count: int) -> None:
        """Name further pages. A prompt may have a hundred thousand tokens: they are hashed as bytes of integers."""
        size, known, tokens = self.page_size, len(request.page_keys), request.tokens
        pages = _cut(tokens[known * size : count * size], size)
        followers = _cut(tokens[(known + 1) * size : count * size + 1 : size], 1)
        followed = b"d" if request.speculate else b"-"
        text = request.text_key or _salted(request.params.cache_salt)
        for index, page, follower in zip(range(known, count), pages, followers, strict=True):
            form = self._form(request, index) if self.two_forms else b""
            text = hashlib.blake2b(text + form + page, digest_size=16).digest()
            request.page_keys.append(text + follower + followed if self.has_draft else text)
        request.text_key = text

    def _form(self, request: Request, index: int) -> bytes:
        """Return how many of a page's tokens belong to the prompt of the request that computes it."""
        num_prompt = len(request.prompt) - index * self.page_size
        return b"whole" if num_prompt >= self.page_size else b"%5d" % max(num_prompt, 0)


def _cut(tokens: Sequence[int], size: int) -> Iterator[bytes]:
    """Yield tokens as bytes, so many at a time."""
    words = array("i", tokens)
    step = words.itemsize * size
    whole = words.tobytes()
    return (whole[start : start + step] for start in range(0, len(whole), step))


def _salted(salt: str) -> bytes:
    """Return what the text of a salt begins with."""
    if not salt:
        return b""
    return hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16, person=b"cache salt").digest()
