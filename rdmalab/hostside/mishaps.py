"""What can go wrong with an endpoint: one tree of errors.

::

    EndpointError             anything that rdmalab.verbs reports
    ├── CardError             the peer's card did not come, is none, or does not fit ours
    ├── ResourceError         an object could not be made: memory region, queue pair, ...
    ├── BringUpError          a queue pair refused a move between its states
    ├── PostError             an order (work request) was refused when it was posted
    ├── WaitTimeout           a completion did not come in time; also a TimeoutError
    └── CompletionError       an order failed; ``.cause`` is the first completion that says why

Every message says what was tried, what came back (by name, never a bare number), the usual cause,
and where to look next.
"""

from __future__ import annotations

import traceback
from types import TracebackType
from typing import Any

__all__ = [
    "BringUpError",
    "CardError",
    "CompletionError",
    "EndpointError",
    "OwnLines",
    "PostError",
    "ResourceError",
    "WaitTimeout",
]


class OwnLines:
    """An error that a notebook shows with the learner's own lines on the way to it, and no more."""

    __traceback__: TracebackType | None

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: the learner's own lines on the way here, then the text."""
        own = [
            f"line {frame.lineno}: {frame.line}"
            for frame in traceback.extract_tb(self.__traceback__)
            if "/ipykernel_" in frame.filename
        ]
        return [*own, f"{type(self).__name__}: {self}"]


class EndpointError(OwnLines, RuntimeError):
    """Base of all errors of :mod:`rdmalab.verbs`. ``errno`` is the kernel's answer, or None."""

    def __init__(self, text: str, errno: int | None = None) -> None:
        super().__init__(text)
        self.errno = errno


class CardError(EndpointError):
    """The peer's address card did not come, is none, or does not fit ours."""


class ResourceError(EndpointError):
    """A verbs object could not be made."""


class BringUpError(EndpointError):
    """A queue pair refused a move between its states."""


class PostError(EndpointError):
    """An order was refused when it was posted: it never reached the wire."""


class WaitTimeout(EndpointError, TimeoutError):
    """A completion did not come before the deadline."""


class CompletionError(EndpointError):
    """An order failed.

    ``cause`` is the first completion that tells why, ``flushed`` those that came back only because
    the queue pair stopped, ``good`` those that had succeeded before.
    """

    def __init__(self, text: str, cause: Any, flushed: list[Any], good: list[Any]) -> None:
        super().__init__(text)
        self.cause = cause
        self.flushed = flushed
        self.good = good
