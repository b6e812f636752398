"""What crosses a host's link: tcpdump in the guest, decoded here.

tcpdump listens on the host's own ``eth0`` and so sees what the host really sent and got (what a
fault has dropped on the way to it never came). Its output comes over while it runs, so there is no
file to leave behind, and the guest ends it when this process is gone.

A capture has begun when tcpdump says that it listens. It is over when tcpdump, asked for its
figures (SIGUSR1), has twice in a row written out all that the kernel took for it: a tcpdump that
is merely stopped throws away what it has not read yet.
"""

from __future__ import annotations

import contextlib
import re
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .errors import BackendError, LabGone, MachineError, UsageError
from .ladder import Ladder
from .packets import Packet, PacketTable
from .pcap import PcapReader, Record
from .remote import Command, Remote

if TYPE_CHECKING:
    from .anatomy import Anatomy

__all__ = ["Capture", "command"]

ROCE_PORT = 4791
MAX_PACKETS = 10_000
SNAPLEN_BYTES = 4352  # a whole frame on a wire of MTU 4200
BUFFER_KIB = 8192  # of the guest kernel's memory, for what tcpdump has not read yet
LISTEN_DEADLINE_S = 20.0
ANSWER_DEADLINE_S = 2.0
QUIET_S = 0.02  # between two looks
STEADY_LOOKS = 5  # after which a difference is not something unread (see Capture._settle)
SETTLE_DEADLINE_S = 1.0  # while others go on talking; then what had come at the first look is in
FIGURES = re.compile(
    r"(\d+) packets? captured\W+(\d+) packets? received by filter\W+(\d+) packets? dropped"
)


class Figures(NamedTuple):
    """What tcpdump has written, what the kernel took for it, what found no room there."""

    captured: int
    received: int
    dropped: int


def command(max_packets: int = MAX_PACKETS, snaplen: int = SNAPLEN_BYTES) -> list[str]:
    """The tcpdump command line, for readers and for the guest."""
    words = ["tcpdump", "-i", "eth0", "--no-promiscuous-mode"]
    words += ["--immediate-mode", "--packet-buffered"]  # neither kernel nor tcpdump holds back
    limits = ["-s", str(snaplen), "-B", str(BUFFER_KIB), "-c", str(max_packets)]
    return [*words, *limits, "-w", "-", f"udp dst port {ROCE_PORT}"]


class Capture:
    """A capture as a context manager: ``with lab.capture() as wire: ...``.

    ``packets`` (a table, also while it runs), ``ladder()``, ``save(path)``, ``count(...)``.

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
        self.figures = Figures(0, 0, 0)
        self._remote = remote
        self._reader = PcapReader()
        self._records: list[Record] = []
        self._packets: list[Packet] = []
        self._said = ""  # by tcpdump, on its standard error
        self._failed: Exception | None = None  # what ended the listening thread
        self._closing = threading.Event()
        self._news = threading.Condition()
        self._stack = contextlib.ExitStack()
        self._command: Command | None = None
        self._thread: threading.Thread | None = None
        self._decoder: Any = None

    @property
    def commands(self) -> list[str]:
        """What is run in the guest, for readers."""
        words = command(self.max_packets, self.snaplen)
        return [" ".join(["ip netns exec", self.host, *words[:-1], f"'{words[-1]}'"])]

    # ------------------------------------------------------------ begin and end

    def __enter__(self) -> Capture:
        if self._command is not None:
            raise UsageError("A capture runs once.", next_step="lab.capture() makes another one.")
        argv = command(self.max_packets, self.snaplen)
        try:
            self._command = self._stack.enter_context(
                self._remote.start("root", argv, host=self.host)
            )
            self._thread = threading.Thread(
                target=self._listen, name=f"rdmalab-capture-{self.host}", daemon=True
            )
            self._thread.start()
            self._wait(lambda: "listening on" in self._said, LISTEN_DEADLINE_S)
            if "listening on" not in self._said:
                why = self._said.strip() or f"no word from tcpdump in {LISTEN_DEADLINE_S:.0f} s"
                raise self._failed or BackendError(
                    f"The capture on {self.host}'s link did not begin: {why}.",
                    next_step="rdmalab exec HOST -- ip link shows the link.",
                )
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *exc: object) -> None:
        try:
            if self.running:
                self._settle()
                self._stop()
        finally:
            self._close()
        if kind is None and isinstance(self._failed, LabGone):
            raise self._failed

    @property
    def running(self) -> bool:
        """Whether it still listens: False before, after, and once it is full."""
        return bool(self._thread and self._thread.is_alive() and not self._closing.is_set())

    def _settle(self) -> None:
        """Wait until all that has passed is here; bounded, for others may never stop talking."""
        end = time.monotonic() + SETTLE_DEADLINE_S
        first = before = self._ask()
        steady = 0
        while before is not None and first is not None:
            time.sleep(QUIET_S)
            now = self._ask()
            if now is None:
                return
            steady = steady + 1 if now == before else 0
            # What came between tcpdump's opening of the device and its filter is counted, and
            # never written: a difference that stays is that.
            unread = now.captured + now.dropped < now.received and steady < STEADY_LOOKS
            here = len(self._records) >= now.captured
            late = time.monotonic() > end and now.captured >= first.received
            if here and (late or (steady and not unread)):
                return
            if time.monotonic() > end + ANSWER_DEADLINE_S:
                return
            before = now

    def _ask(self) -> Figures | None:
        """tcpdump's figures of now; None if it has ended or does not answer."""
        asked = len(FIGURES.findall(self._said))
        if self._command is None or not self.running:
            return None
        self._command.signal(signal.SIGUSR1)
        self._wait(lambda: len(FIGURES.findall(self._said)) > asked, ANSWER_DEADLINE_S)
        return self.figures if len(FIGURES.findall(self._said)) > asked else None

    def _stop(self) -> None:
        """Ask tcpdump to end, and wait for its last words."""
        if self._command is not None:
            self._command.signal(signal.SIGINT)
            self._wait(lambda: False, ANSWER_DEADLINE_S)

    def _close(self) -> None:
        """End the thread and, if it still runs, the command; may be called twice."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(2)
        with contextlib.suppress(BackendError):  # the lab is gone, and tcpdump with it
            self._stack.close()

    def _wait(self, reached: Any, deadline_s: float) -> None:
        """Until something is reached, the listening has ended, or the deadline."""
        with self._news:
            self._news.wait_for(lambda: reached() or not self.running, deadline_s)

    # ------------------------------------------------------------ listening

    def _listen(self) -> None:
        """Take what tcpdump writes and says; runs in its own thread."""
        try:
            while self._command is not None and self._command.code is None:
                item = self._command.read(0.2)
                with self._news:
                    if item is not None:
                        self._take(*item)
                    self._news.notify_all()
                if self._closing.is_set():
                    break
        except Exception as error:
            self._failed = error
        finally:
            with self._news:
                self._closing.set()
                self._news.notify_all()

    def _take(self, stream: str, data: bytes) -> None:
        if stream == "stdout":
            self._records += self._reader.feed(data)
            return
        self._said += data.decode(errors="replace")
        for found in FIGURES.findall(self._said)[-1:]:
            self.figures = Figures(*map(int, found))

    # ------------------------------------------------------------ what was captured

    @property
    def notes(self) -> list[str]:
        """What is to be known about the capture as a whole, in sentences."""
        notes = []
        if len(self._records) >= self.max_packets:
            notes.append(
                f"The capture ended after {self.max_packets} packets, its limit (max_packets)."
            )
        cut = sum(len(record.frame) < record.length for record in self._records)
        if cut:
            notes.append(f"Of {cut} packets only the first {self.snaplen} bytes were kept.")
        if self.figures.dropped:
            notes.append(
                f"{self.figures.dropped} packets are missing: they came faster than tcpdump"
                " could write them."
            )
        if self._failed is not None:
            notes.append(f"The capture was broken off: {self._failed}")
        return notes

    @property
    def packets(self) -> PacketTable:
        """The packets so far."""
        from .decoder import Decoder  # scapy takes half a second to import

        if self._decoder is None:
            self._decoder = Decoder(self.names)
        for record in self._records[len(self._packets) :]:
            self._packets.append(self._decoder.packet(record))
        return PacketTable(self._packets, self.notes)

    def count(self, **wanted: Any) -> int:
        """How many packets have these attributes: ``count(opcode="SEND_ONLY", src="alice")``."""
        return len(self.packets.where(**wanted))

    def layers(self, number: int) -> Anatomy:
        """One packet taken apart, by its number in the table: its headers and what they say."""
        from .anatomy import take_apart  # with scapy

        if not 1 <= number <= len(self._records):
            raise UsageError(f"There is no packet {number}; there are {len(self._records)}.")
        return take_apart(self._records[number - 1])

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
            path.write_bytes(self._reader.whole())
        except OSError as error:
            raise MachineError(
                f"The capture cannot be written to {path}: {error.strerror}.",
                next_step="Give another file.",
            ) from None
        return path

    def __repr__(self) -> str:
        return f"<Capture of {self.host}'s link: {len(self._records)} packets>"
