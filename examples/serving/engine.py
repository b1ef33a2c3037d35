"""Continuous batching over a pool of pages, for a model of any framework.

A step gives each running request its next tokens: up to ``CHUNK`` of a prompt that is not yet read, or the one that it
has just made. A request that ends leaves its place and its pages to the next one in the queue. The arrays of a step
have one of two shapes, so that a compiled step serves all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

CHUNK = 32  # tokens of a prompt that a step reads
NOWHERE = -1  # a slot or a page that is not there


class Step(NamedTuple):
    """What a model computes at once, of ``b`` requests; new tokens stand last, what stands before them is not stored.

    Attributes:
        tokens: (b, s).
        positions: (b, s), of each token in its sequence.
        slots: (b, s), where its keys and values go.
        lengths: (b,), tokens of each sequence, new ones included.
        page_table: (b, t), its pages.
    """

    tokens: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    lengths: np.ndarray
    page_table: np.ndarray


@dataclass
class Request:
    """A prompt, how many tokens are to follow it, and those that have."""

    prompt: Sequence[int]
    new_tokens: int
    made: list[int] = field(default_factory=list)
    read: int = 0  # tokens whose keys and values are in the cache
    pages: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.made]


class Engine:
    """Runs requests until all have their tokens.

    Args:
        model: ``model(step) -> (b,)``: the token that follows each sequence's last one.
        batch: requests that run at a time.
        pages: of the pool.
        page_size: slots of a page.
        longest: tokens of a sequence at most.
    """

    def __init__(
        self, model: Callable[[Step], np.ndarray], *, batch: int, pages: int, page_size: int, longest: int
    ) -> None:
        if min(batch, pages, page_size, longest) < 1:
            raise ValueError(f"{batch=}, {pages=}, {page_size=} and {longest=} must be 1 or more")
        self.model, self.size, self.longest = model, page_size, longest
        self.running: list[Request | None] = [None] * batch
        self.free, self.steps = list(range(pages)), 0

    def run(self, requests: Sequence[Request]) -> None:
        for request in requests:
            prompt, new = len(request.prompt), request.new_tokens
            if min(prompt, new) < 1 or prompt + new > self.longest:
                raise ValueError(
                    f"a request has a prompt and new tokens, {self.longest} at most, got {prompt} and {new}"
                )
        waiting = deque(requests)
        while waiting or any(self.running):
            self._admit(waiting)
            if not any(self.running):
                raise ValueError(f"a request needs more than {len(self.free)} pages")
            self._take(self.model(self._step()))
            self.steps += 1

    def _admit(self, waiting: deque[Request]) -> None:
        """Give free places to requests whose pages are free, too."""
        for place, request in enumerate(self.running):
            if request is None and waiting:
                needed = -(-(len(waiting[0].prompt) + waiting[0].new_tokens) // self.size)
                if needed > len(self.free):
                    return
                self.running[place] = waiting.popleft()
                self.running[place].pages = [self.free.pop() for _ in range(needed)]

    def _step(self) -> Step:
        queries = CHUNK if any(r and len(r.tokens) - r.read > 1 for r in self.running) else 1
        shape = len(self.running), queries
        tokens, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        slots, lengths = np.full(shape, NOWHERE, np.int32), np.zeros(shape[0], np.int32)
        table = np.full((shape[0], -(-self.longest // self.size)), NOWHERE, np.int32)
        for i, request in enumerate(self.running):
            if request is not None:
                new = request.tokens[request.read : request.read + queries]
                places = np.arange(request.read, request.read + len(new))
                pages = np.asarray(request.pages)
                table[i, : len(pages)] = pages
                tokens[i, queries - len(new) :], positions[i, queries - len(new) :] = new, places
                slots[i, queries - len(new) :] = pages[places // self.size] * self.size + places % self.size
                request.read += len(new)
                lengths[i] = request.read
        return Step(tokens, positions, slots, lengths, table)

    def _take(self, following: np.ndarray) -> None:
        """Give each request that has been read whole the token that follows, and let go of those that end."""
        for place, request in enumerate(self.running):
            if request is not None and request.read == len(request.tokens):
                request.made.append(int(following[place]))
                if len(request.made) == request.new_tokens:
                    self.free += request.pages
                    self.running[place] = None
