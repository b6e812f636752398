"""The pcap format, read piece by piece as it arrives (pcap-savefile(5))."""

from __future__ import annotations

import struct
from typing import NamedTuple

__all__ = ["PcapReader", "Record"]

FILE_HEADER_BYTES, RECORD_HEADER_BYTES = 24, 16
TICKS = {0xA1B2C3D4: 1e6, 0xA1B23C4D: 1e9}  # by the file's first four bytes: a second's ticks


class Record(NamedTuple):
    """One frame: when (seconds since 1970), the bytes that were kept, its length on the wire."""

    time_s: float
    frame: bytes
    length: int


class PcapReader:
    """Records out of a stream of bytes. ``data`` is the file so far, byte by byte as it came."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.order = ""  # of the file's bytes, as struct writes it; "" until the header is there
        self.ticks = 1e6
        self.done = 0  # bytes that have become records

    def feed(self, data: bytes) -> list[Record]:
        """Take some more bytes; the records that are whole now. ``ValueError`` if it is no pcap."""
        self.data += data
        if not self.order:
            if len(self.data) < FILE_HEADER_BYTES:
                return []
            self._begin()
        records = []
        while len(self.data) >= self.done + RECORD_HEADER_BYTES:
            header = struct.unpack_from(self.order + "4I", self.data, self.done)
            seconds, ticks, kept, length = header
            start = self.done + RECORD_HEADER_BYTES
            if len(self.data) < start + kept:
                break
            frame = bytes(self.data[start : start + kept])
            records.append(Record(seconds + ticks / self.ticks, frame, length))
            self.done = start + kept
        return records

    def whole(self) -> bytes:
        """The file without a record that has come only in part."""
        return bytes(self.data[: self.done])

    def _begin(self) -> None:
        """The file's own header."""
        for order in "<>":
            (magic,) = struct.unpack_from(order + "I", self.data)
            if magic in TICKS:
                self.order, self.ticks, self.done = order, TICKS[magic], FILE_HEADER_BYTES
                return
        raise ValueError(f"no pcap file: it begins with the bytes {self.data[:4].hex(' ')}")
