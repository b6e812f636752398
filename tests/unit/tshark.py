"""tshark's reading of a pcap file, held against ours: a dissector that we did not write."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from rdmalab.packets import UNDECODED, Packet

NAKS = (
    "PSN sequence error",
    "invalid request",
    "remote access error",
    "remote operational error",
    "invalid RD request",
)


def syndrome(packet: Packet) -> int | None:
    """The kind of an acknowledgement by its name, as a number: ACK, RNR NAK, NAK."""
    if packet.syndrome is None:
        return None
    return {"ACK": 0, "RNR NAK": 1}.get(packet.syndrome, 3)


def nak_code(packet: Packet) -> int | None:
    text = packet.syndrome or ""
    return NAKS.index(text.removeprefix("NAK: ")) if text.startswith("NAK: ") else None


# Field of tshark (below "infiniband.") -> our value of it. Numbers in any base.
FIELDS: dict[str, Callable[[Packet], int | None]] = {
    "bth.opcode": lambda p: p.code,
    "bth.destqp": lambda p: p.qp,
    "bth.psn": lambda p: p.psn,
    "bth.a": lambda p: int(p.ack_request),
    "bth.se": lambda p: int(p.solicited),
    "reth.va": lambda p: (p.reth or p.atomic or (None,))[0],
    "reth.r_key": lambda p: (p.reth or p.atomic or (None, None))[1],
    "reth.dmalen": lambda p: p.reth.length if p.reth else None,
    "atomiceth.swapdt": lambda p: p.atomic.swap_or_add if p.atomic else None,
    "atomiceth.cmpdt": lambda p: p.atomic.compare if p.atomic else None,
    "atomicacketh.origremdt": lambda p: p.atomic_original,
    "deth.q_key": lambda p: p.qkey,
    "deth.srcqp": lambda p: p.src_qp,
    "aeth.syndrome.opcode": syndrome,
    "aeth.syndrome.error_code": nak_code,
    "aeth.msn": lambda p: p.msn,
    "immdt": lambda p: p.imm,
    "invariant.crc": lambda p: p.icrc,
}
HEXADECIMAL = ("immdt",)  # written without 0x
FLAGS = {"True": 1, "False": 0}  # as tshark 4.4 writes what 4.0 wrote as 1 and 0


def read(file: Path) -> list[dict[str, int | None]]:
    """What tshark finds in each frame; ``malformed`` is 1 where it gave up on the payload."""
    tshark = shutil.which("tshark")
    if tshark is None:
        pytest.skip("no tshark here; rdmalab doctor --fix --test installs it")
    words = [tshark, "-r", str(file), "-T", "fields", "-E", "separator=|", "-E", "occurrence=f"]
    for name in FIELDS:
        words += ["-e", f"infiniband.{name}"]
    done = subprocess.run(
        [*words, "-e", "_ws.malformed"], capture_output=True, text=True, check=True, timeout=100
    )
    rows = []
    for line in done.stdout.splitlines():
        *texts, malformed = line.split("|")
        row: dict[str, int | None] = {"malformed": int(bool(malformed))}
        for name, text in zip(FIELDS, texts, strict=True):
            row[name] = number(name, text) if text else None
        rows.append(row)
    return rows


def number(name: str, text: str) -> int:
    """The value of a field as tshark, 4.0 to 4.4 at least, writes it."""
    return FLAGS[text] if text in FLAGS else int(text, 16 if name in HEXADECIMAL else 0)


def assert_as_tshark(file: Path, packets: Sequence[Packet]) -> None:
    """Packet by packet, header by header; a frame that we could not decode is none to tshark."""
    rows = read(file)
    assert len(rows) == len(packets)
    compared = checksums = 0
    for packet, row in zip(packets, rows, strict=True):
        if packet.opcode == UNDECODED:
            assert row["malformed"] or row["bth.opcode"] is None or row["invariant.crc"] is None
            continue
        ours = {name: value(packet) for name, value in FIELDS.items()}
        theirs = {name: row[name] for name in FIELDS}
        if row["invariant.crc"] is None:  # it took the payload for another protocol's, and stopped
            del ours["invariant.crc"]
        checksums += row["invariant.crc"] is not None
        differ = {name: (ours[name], theirs[name]) for name in ours if ours[name] != theirs[name]}
        assert not differ, f"packet {packet.number}: {packet.summary}; ours, theirs: {differ}"
        compared += 1
    assert compared and checksums > compared / 2
