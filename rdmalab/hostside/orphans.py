"""Verbs objects that only the garbage collector finds, closed in their order.

An error keeps the frames that it came through, and these keep what was in them. When such a knot is
dropped, Python's collector finds it later, and frees what is in it in any order: a device before
what was made on it. pyverbs then complains of a bad descriptor, or crashes. So while the collector
is at work, a verbs object that it finds is kept here, and closed right after, children first.
"""

from __future__ import annotations

import contextlib
import gc
from typing import Any

__all__ = ["collecting", "keep", "watch"]

CHILDREN_FIRST = ("QP", "AH", "MW", "MR", "SRQ", "CQ", "CompChannel", "PD", "Context")

_found: list[Any] = []
_collecting = False


def collecting() -> bool:
    """Whether the collector is at work at this moment."""
    return _collecting


def keep(thing: Any) -> None:
    """Keep an object that the collector is about to free (called from its ``__del__``)."""
    _found.append(thing)


def watch() -> None:
    """Have the collector tell when it begins and when it has ended."""
    if _on_collector not in gc.callbacks:
        gc.callbacks.append(_on_collector)


def _on_collector(phase: str, _: dict[str, int]) -> None:
    global _collecting
    _collecting = phase == "start"
    if phase == "stop" and _found:
        found = sorted(_found, key=_rank)
        _found.clear()
        for thing in found:
            with contextlib.suppress(Exception):
                thing.close()


def _rank(thing: Any) -> int:
    names = [kind.__name__ for kind in type(thing).__mro__]
    return min((CHILDREN_FIRST.index(name) for name in names if name in CHILDREN_FIRST), default=0)
