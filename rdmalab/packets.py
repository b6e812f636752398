"""RoCEv2 packets as plain data, and the table that shows them.

Names are the InfiniBand specification's (Volume 1, chapter 9): opcodes as in its table of them, in
capitals; what an acknowledgement says (its *syndrome*) in words. :mod:`rdmalab.decoder` makes these
out of captured bytes; nothing here needs a library.
"""

from __future__ import annotations

import html
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple, SupportsIndex, overload

from .errors import UsageError
from .opcodes import OPERATIONS

__all__ = ["COLUMNS", "UNDECODED", "Atomic", "Packet", "PacketTable", "Reth", "cells"]

UNDECODED = "UNDECODED"
SHOWN_ROWS = 100  # of a table; a notebook with ten thousand rows stops answering


class Reth(NamedTuple):
    """RDMA extended transport header: the remote memory that a WRITE or READ is about."""

    va: int
    rkey: int
    length: int


class Atomic(NamedTuple):
    """Atomic extended transport header: ``swap_or_add`` is what FETCH_ADD adds."""

    va: int
    rkey: int
    swap_or_add: int
    compare: int


@dataclass(frozen=True)
class Packet:
    """One packet. What it does not carry is None.

    ``time_s``: when it passed, in seconds since 1970 on the hosts' clock (``time.time()`` there).
    ``src``, ``dst``: the hosts' names, or addresses. ``qp``: the queue pair it goes to.
    ``syndrome``: what an acknowledgement says; ``credits`` (ACK; None: no limit is given) and
    ``rnr_timer_ms`` (RNR NAK) come with it. ``imm``: the four bytes in network order. ``payload``:
    bytes of the message in it. ``again``: a packet to this queue pair with this opcode and PSN was
    seen before in this capture, so it was sent again (or the queue pair began anew).
    ``length``: bytes of the whole Ethernet frame. ``note``: why it could not be decoded.
    """

    number: int
    time_s: float
    src: str
    dst: str
    opcode: str
    transport: str = ""
    code: int | None = None
    qp: int | None = None
    psn: int | None = None
    ack_request: bool = False
    solicited: bool = False
    syndrome: str | None = None
    credits: int | None = None
    rnr_timer_ms: float | None = None
    msn: int | None = None
    reth: Reth | None = None
    atomic: Atomic | None = None
    atomic_original: int | None = None
    imm: int | None = None
    invalidate_rkey: int | None = None
    qkey: int | None = None
    src_qp: int | None = None
    payload: int = 0
    icrc: int | None = None
    again: bool = False
    length: int = 0
    note: str = ""

    @property
    def is_response(self) -> bool:
        """Whether it answers a request (acknowledgements and READ responses)."""
        return self.syndrome is not None or self.opcode.startswith("RDMA_READ_RESPONSE")

    @property
    def is_nak(self) -> bool:
        """Whether it refuses: any acknowledgement other than an ACK."""
        return self.syndrome not in (None, "ACK")

    @property
    def title(self) -> str:
        """What it is, in the specification's words: ``SEND FIRST``, ``NAK: remote access error``.

        UC and UD say so; RC, which is nearly everything, does not.
        """
        if self.is_nak:
            return str(self.syndrome)
        kind = f"{self.transport} " if self.transport not in ("", "RC") else ""
        return "ACK" if self.opcode == "ACKNOWLEDGE" else kind + self.opcode.replace("_", " ")

    @property
    def details(self) -> str:
        """What its further headers say, in words."""
        said = []
        if self.reth is not None:
            said.append(
                f"va 0x{self.reth.va:x}, rkey 0x{self.reth.rkey:x}, {self.reth.length} bytes"
            )
        if self.atomic is not None:
            said.append(f"va 0x{self.atomic.va:x}, rkey 0x{self.atomic.rkey:x}")
            if self.opcode == "COMPARE_SWAP":
                said.append(f"compare {self.atomic.compare}, swap {self.atomic.swap_or_add}")
            else:
                said.append(f"add {self.atomic.swap_or_add}")
        if self.syndrome is not None:
            said.append(f"MSN {self.msn}")
        if self.rnr_timer_ms is not None:
            said.append(f"wait {self.rnr_timer_ms} ms")
        if self.credits is not None:
            said.append(f"credit code {self.credits}")
        if self.atomic_original is not None:
            said.append(f"original value {self.atomic_original}")
        if self.imm is not None:
            said.append(f"immediate {self.imm.to_bytes(4, 'big').hex(' ')}")
        if self.invalidate_rkey is not None:
            said.append(f"invalidates rkey 0x{self.invalidate_rkey:x}")
        if self.src_qp is not None:
            said.append(f"from QP {self.src_qp}, Q_Key 0x{self.qkey:x}")
        return "; ".join([*said, *([self.note] if self.note else [])])

    @property
    def summary(self) -> str:
        """One line: ``alice -> bob  SEND FIRST  PSN 1000  1024 bytes``."""
        parts = [f"{self.src} -> {self.dst}", ("again: " if self.again else "") + self.title]
        if self.psn is not None:
            parts.append(f"PSN {self.psn}")
        if self.payload:
            parts.append(f"{self.payload} bytes")
        return "  ".join([*parts, *([self.details] if self.details else [])])

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON: only what it carries."""
        known = {key: value for key, value in asdict(self).items() if value not in (None, "")}
        for key in ("reth", "atomic"):
            if (value := getattr(self, key)) is not None:
                known[key] = value._asdict()
        return known


COLUMNS = ("no.", "ms", "from", "to", "opcode", "QP", "PSN", "ack?", "bytes", "says")


def cells(packet: Packet, start_s: float) -> tuple[str, ...]:
    """A row of the table, one text for each of :data:`COLUMNS`."""
    return (
        str(packet.number),
        f"{(packet.time_s - start_s) * 1e3:.2f}",
        packet.src,
        packet.dst,
        ("again: " if packet.again else "") + packet.title,
        "" if packet.qp is None else str(packet.qp),
        "" if packet.psn is None else str(packet.psn),
        "yes" if packet.ack_request else "",
        str(packet.payload),
        packet.details,
    )


class PacketTable(list[Packet]):
    """Packets in the order in which they passed; a list that shows itself as a table.

    ``notes``: what is to be known about the capture as a whole, in sentences.
    """

    def __init__(self, packets: Iterable[Packet] = (), notes: Iterable[str] = ()) -> None:
        super().__init__(packets)
        self.notes = tuple(notes)

    @overload
    def __getitem__(self, index: SupportsIndex) -> Packet: ...
    @overload
    def __getitem__(self, index: slice) -> PacketTable: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Packet | PacketTable:
        got = super().__getitem__(index)
        return PacketTable(got, self.notes) if isinstance(got, list) else got

    def where(self, **wanted: Any) -> PacketTable:
        """The packets with these attributes: ``where(opcode="SEND_ONLY", src="alice")``.

        Raises :class:`UsageError` for an attribute or an opcode that does not exist.
        """
        known = [*(field.name for field in fields(Packet)), "is_response", "is_nak", "title"]
        for name in wanted:
            if name not in known:
                raise UsageError(f"A packet has no {name!r}; it has {', '.join(known)}.")
        opcode = wanted.get("opcode", UNDECODED)
        if opcode not in (*OPERATIONS, "CNP", UNDECODED) and not opcode.startswith("UNKNOWN"):
            raise UsageError(
                f"There is no opcode {opcode!r}; there are {', '.join(OPERATIONS)} and CNP."
            )
        found = (p for p in self if all(getattr(p, k) == v for k, v in wanted.items()))
        return PacketTable(found, self.notes)

    def _rows(self) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
        """Rows to show, and notes with what is not shown."""
        start_s = self[0].time_s if self else 0.0
        rows = [cells(packet, start_s) for packet in list(self)[:SHOWN_ROWS]]
        more = len(self) - len(rows)
        left = (f"{more} more packets are not shown; slice the table to see them.",) if more else ()
        return rows, (*(() if self else ("No RoCEv2 packet was seen.",)), *self.notes, *left)

    def __repr__(self) -> str:
        rows, notes = self._rows()
        widths = [max(map(len, column)) for column in zip(COLUMNS, *rows, strict=True)]
        lines = [
            "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
            for row in ((COLUMNS, *rows) if rows else ())
        ]
        return "\n".join([*lines, *notes])

    def _repr_html_(self) -> str:
        rows, notes = self._rows()
        head = "".join(f'<th scope="col" style="text-align:left">{name}</th>' for name in COLUMNS)
        body = "".join(
            "<tr>"
            + "".join(f'<td style="text-align:left">{html.escape(text)}</td>' for text in row)
            + "</tr>"
            for row in rows
        )
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        said = "".join(f"<p>{html.escape(note)}</p>" for note in notes)
        return (table if rows else "") + said
