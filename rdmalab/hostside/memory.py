"""Memory to register: whole pages that nothing else shares, with bounds that are checked.

A page whose half is registered and whose other half holds something else is trouble after a
``fork``: libibverbs may have to keep registered pages from the child, whole pages (B36). And a
Python object may move or go away; a mapping stays where it is.
"""

from __future__ import annotations

import mmap
from ctypes import addressof, c_char

import pyverbs.enums as e

__all__ = ["Buffer", "access_flags"]


def access_flags(words: str) -> int:
    """``"local_write remote_read"`` as the sum of the ``IBV_ACCESS_*`` bits."""
    return sum(getattr(e, f"IBV_ACCESS_{word.upper()}") for word in words.split())


class Buffer:
    """``size`` bytes in pages of their own.

    ``buffer[10:20]`` is bytes, ``buffer[10:20] = b"..."`` writes them; a place outside raises
    IndexError. ``numpy.frombuffer(buffer, ...)`` and ``memoryview(buffer)`` see the memory itself.
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"a buffer has at least one byte, not {size}")
        self._pages = mmap.mmap(-1, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
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
