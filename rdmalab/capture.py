"""What crosses a host's link: tcpdump in the guest (:mod:`rdmalab.tap`), decoded here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import LabGone, MachineError, UsageError
from .ladder import Ladder
from .packets import Packet, PacketTable
from .remote import Remote
from .tap import MAX_PACKETS, SNAPLEN_BYTES, Figures, Tap

if TYPE_CHECKING:
    from .anatomy import Anatomy

__all__ = ["MAX_PACKETS", "Capture"]


class Capture:
    """A capture as a context manager: ``with lab.capture() as wire: ...``.

    ``packets`` (a table, also while it runs), ``layers(number)``, ``ladder()``, ``save(path)``,
    ``count(...)``.

    Parameters
    ----------
    max_packets: after so many it stops by itself. snaplen: bytes to keep of each packet.
    """

    def __init__(
        self,
        remote: Remote,
        host: str,
        hosts: Sequence[dict[str, Any]],
        *,
        max_packets: int = MAX_PACKETS,
        snaplen: int = SNAPLEN_BYTES,
    ) -> None:
        for name, value, least in (("max_packets", max_packets, 1), ("snaplen", snaplen, 64)):
            if not isinstance(value, int) or not least <= value <= 1_000_000:
                raise UsageError(f"{name} is {value!r}; it takes a whole number from {least} on.")
        self.host, self.max_packets, self.snaplen = host, max_packets, snaplen
        self.hosts = [str(facts["name"]) for facts in hosts]
        self.names = {facts[key]: facts["name"] for facts in hosts for key in ("ip", "mac")}
        self._tap = Tap(remote, host, max_packets, snaplen)
        self._begun = False
        self._packets: list[Packet] = []
        self._decoder: Any = None

    @property
    def commands(self) -> list[str]:
        """What is run in the guest, for readers."""
        *words, what = self._tap.argv
        return [" ".join(["ip netns exec", self.host, *words, f"'{what}'"])]

    def __enter__(self) -> Capture:
        if self._begun:
            raise UsageError("A capture runs once.", next_step="lab.capture() makes another one.")
        self._begun = True
        self._tap.begin()
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *exc: object) -> None:
        self._tap.end()
        if kind is None and isinstance(self._tap.failed, LabGone):
            raise self._tap.failed

    @property
    def running(self) -> bool:
        """Whether it still listens: False before, after, and once it is full."""
        return self._tap.running

    @property
    def figures(self) -> Figures:
        """tcpdump's own count: captured, received, dropped."""
        return self._tap.figures

    @property
    def notes(self) -> list[str]:
        """What is to be known about the capture as a whole, in sentences."""
        notes = []
        if len(self._tap.records) >= self.max_packets:
            notes.append(
                f"The capture ended after {self.max_packets} packets, its limit (max_packets)."
            )
        cut = sum(len(record.frame) < record.length for record in self._tap.records)
        if cut:
            notes.append(f"Of {cut} packets only the first {self.snaplen} bytes were kept.")
        if self.figures.dropped:
            notes.append(
                f"{self.figures.dropped} packets are missing: they came faster than tcpdump"
                " could write them."
            )
        if not self._tap.whole:
            notes.append("The last packets may be missing: the guest did not answer in time.")
        if self._tap.ended_early:
            notes.append(f"The capture ended early: {self._tap.ended_early}.")
        if self._tap.failed is not None:
            notes.append(f"The capture was broken off: {self._tap.failed}")
        return notes

    @property
    def packets(self) -> PacketTable:
        """The packets so far."""
        from .decoder import Decoder  # scapy takes half a second to import

        if self._decoder is None:
            self._decoder = Decoder(self.names)
        for record in self._tap.records[len(self._packets) :]:
            self._packets.append(self._decoder.packet(record))
        return PacketTable(self._packets, self.notes)

    def count(self, **wanted: Any) -> int:
        """How many packets have these attributes: ``count(opcode="SEND_ONLY", src="alice")``."""
        return len(self.packets.where(**wanted))

    def layers(self, number: int) -> Anatomy:
        """One packet taken apart, by its number in the table: its headers and what they say."""
        from .anatomy import take_apart  # with scapy

        if not 1 <= number <= len(self._tap.records):
            raise UsageError(f"There is no packet {number}; there are {len(self._tap.records)}.")
        return take_apart(self._tap.records[number - 1])

    def ladder(
        self,
        calls: Sequence[Any] | None = None,
        title: str | None = None,
        packets: Sequence[Packet] | None = None,
    ) -> Ladder:
        """The sequence diagram of the packets (or of some of them), with the calls that made them.

        ``calls``: ``(host, text, when)`` each, see :class:`~rdmalab.ladder.Ladder`.
        """
        shown = self.packets if packets is None else packets
        return Ladder(shown, calls or (), title=title or "", hosts=self.hosts)

    def save(self, path: str | Path) -> Path:
        """Write a pcap file, for Wireshark or tshark. An existing file is replaced."""
        path = Path(path)
        try:
            path.write_bytes(self._tap.reader.whole())
        except OSError as error:
            raise MachineError(
                f"The capture cannot be written to {path}: {error.strerror}.",
                next_step="Give another file.",
            ) from None
        return path

    def __repr__(self) -> str:
        return f"<Capture of {self.host}'s link: {len(self._tap.records)} packets>"
