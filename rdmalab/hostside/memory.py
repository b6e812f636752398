"""Memory to register: whole pages that nothing else shares, with bounds that are checked.

A page whose half is registered and whose other half holds something else is trouble after a
``fork``: libibverbs may have to keep registered pages from the child, whole pages (B36). And a
Python object may move or go away; a mapping stays where it is.
"""

from __future__ import annotations

import mmap
import re
import resource
from ctypes import addressof, c_char
from pathlib import Path
from typing import Any

import pyverbs.enums as e
from pyverbs.fork import is_fork_initialized
from pyverbs.mr import MR
from pyverbs.pyverbs_error import PyverbsRDMAError

from . import refusals
from .mishaps import ResourceError

__all__ = ["Buffer", "access_flags", "fork_status", "pinned", "register"]

RIGHTS = ("local_write", "remote_write", "remote_read", "remote_atomic", "mw_bind")


def access_flags(words: str) -> int:
    """``"local_write remote_read"`` as the sum of the ``IBV_ACCESS_*`` bits."""
    flags = 0
    for word in words.split():
        if word not in RIGHTS:
            raise ValueError(f"{word!r} is no right to memory; there are: {', '.join(RIGHTS)}")
        flags |= getattr(e, f"IBV_ACCESS_{word.upper()}")
    return int(flags)


def pinned() -> int:
    """Bytes that this process has pinned: VmPin of /proc/self/status."""
    found = re.search(r"VmPin:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


def fork_status() -> str:
    """Whether registered memory survives a ``fork``: what ``ibv_is_fork_initialized`` says."""
    words = {
        0: "disabled: after a fork, parent and child may each see their own copy of a page",
        1: "enabled: registered pages are kept from the child (MADV_DONTFORK)",
        2: "unneeded: this kernel copies pinned pages for the child at the fork",
    }
    return words[int(is_fork_initialized())]


def register(pd: Any, buffer: Buffer, access: str) -> Any:
    """A memory region over a buffer. :class:`ResourceError` says why there is none."""
    size = len(buffer)
    try:
        return MR(pd, size, access_flags(access), buffer.address)
    except PyverbsRDMAError as error:
        limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        limit = 1 << 63 if limit == resource.RLIM_INFINITY else limit
        number = error.error_code
        text = refusals.memory(size, access, number, limit, pinned())
        raise ResourceError(text, number) from None


class Buffer:
    """``size`` bytes in pages of their own.

    ``buffer[10:20]`` is bytes, ``buffer[10:20] = b"..."`` writes them; a place outside raises
    IndexError. ``numpy.frombuffer(buffer, ...)`` and ``memoryview(buffer)`` see the memory itself.
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"a buffer has at least one byte, not {size}")
        whole = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self._pages = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._view = memoryview(self._pages)[:size]
        self.address = addressof(c_char.from_buffer(self._pages))

    def __len__(self) -> int:
        return len(self._view)

    def __repr__(self) -> str:
        return f"<Buffer: {len(self)} bytes at {self.address:#x}>"

    def __buffer__(self, flags: int) -> memoryview:
        return self._view

    def __getitem__(self, where: int | slice) -> bytes:
        return bytes(self._view[self.span(where)])

    def __setitem__(self, where: int | slice, data: bytes | int) -> None:
        span = self.span(where)
        new = bytes([data]) if isinstance(data, int) else data
        if len(new) != span.stop - span.start:
            raise ValueError(f"{len(new)} bytes do not fit into {span.stop - span.start}")
        self._view[span] = new

    def span(self, where: int | slice) -> slice:
        """``where`` with both ends, none of them outside. A single number is one byte."""
        if isinstance(where, slice):
            if where.step not in (None, 1):
                raise IndexError("a buffer has no steps")
            first = where.start or 0
            last = len(self) if where.stop is None else where.stop
        else:
            first, last = where, where + 1
        if not 0 <= first <= last <= len(self):
            raise IndexError(f"bytes {first} to {last} are not in a buffer of {len(self)} bytes")
        return slice(first, last)
