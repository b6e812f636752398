"""tcpdump on a host's link, in the guest: begun for certain, ended without a loss.

It listens on the host's own ``eth0`` and so sees what the host really sent and got (what a fault
has dropped on the way to it never came). Its output comes over while it runs, so there is no file
to leave behind, and the guest ends it when this process is gone.

It has begun when tcpdump says that it listens. It is over when tcpdump, asked for its figures
(SIGUSR1), has twice in a row written out all that the kernel took for it: a tcpdump that is merely
stopped throws away what it has not read yet.
"""

from __future__ import annotations

import contextlib
import re
import signal
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from . import differences
from .errors import BackendError
from .hostside.errands import capture_line
from .pcap import PcapReader, Record
from .remote import Command, Remote

__all__ = ["MAX_PACKETS", "SNAPLEN_BYTES", "Figures", "Tap"]

MAX_PACKETS = 10_000
SNAPLEN_BYTES = 4352  # a whole frame on a wire of MTU 4200
LISTEN_DEADLINE_S = 20.0
ANSWER_DEADLINE_S = 5.0
QUIET_S = 0.02  # between two looks
STEADY_LOOKS = 5  # after which a difference is not something unread (see Tap._settle)
SETTLE_DEADLINE_S = 1.0  # while others go on talking; then what had come at the first look is in
FIGURES = re.compile(
    r"(\d+) packets? captured\W+(\d+) packets? received by filter\W+(\d+) packets? dropped"
)


class Figures(NamedTuple):
    """What tcpdump has written, what the kernel took for it, what found no room there."""

    captured: int
    received: int
    dropped: int


class Tap:
    """One run of tcpdump. ``records``: what it has written; ``failed``: what broke it off.

    ``argv``: its command line, for readers. ``figures``: tcpdump's own count.
    ``whole``: False if the last packets may be missing.
    """

    def __init__(
        self,
        remote: Remote,
        host: str,
        max_packets: int = MAX_PACKETS,
        snaplen: int = SNAPLEN_BYTES,
    ) -> None:
        self.host, self.argv = host, capture_line(max_packets, snaplen)
        self._errand = ["capture", str(max_packets), str(snaplen)]
        self.reader = PcapReader()
        self.records: list[Record] = []
        self.figures = Figures(0, 0, 0)
        self.failed: Exception | None = None
        self.whole = True
        self.said = ""  # by tcpdump, on its standard error
        self._remote = remote
        self._closing = threading.Event()
        self._news = threading.Condition()
        self._stack = contextlib.ExitStack()
        self._command: Command | None = None
        self._thread: threading.Thread | None = None

    @property
    def running(self) -> bool:
        """Whether it listens: False before, after, and once it is full."""
        return bool(self._thread and self._thread.is_alive() and not self._closing.is_set())

    @property
    def ended_early(self) -> str:
        """tcpdump's last words if it has ended with an error, else ""."""
        if self._command is None or self._command.code in (None, 0):
            return ""
        return (self.said.strip().splitlines() or ["no reason given"])[-1]

    def begin(self) -> None:
        """Start it; returns when it listens. Raises :class:`BackendError` with its reason."""
        differences.require_wire(self._remote.state)
        try:
            self._command = self._stack.enter_context(
                self._remote.start("errand", self._errand, host=self.host)
            )
            self._thread = threading.Thread(
                target=self._listen, name=f"rdmalab-capture-{self.host}", daemon=True
            )
            self._thread.start()
            self._wait(lambda: "listening on" in self.said, LISTEN_DEADLINE_S)
            if "listening on" not in self.said:
                why = self.said.strip() or f"no word from tcpdump in {LISTEN_DEADLINE_S:.0f} s"
                raise self.failed or BackendError(
                    f"The capture on {self.host}'s link did not begin: {why}.",
                    next_step="rdmalab exec HOST -- ip link shows the link.",
                )
        except BaseException:
            self._close()
            raise

    def end(self) -> None:
        """Stop it when all that has passed is here; may be called twice."""
        try:
            if self.running:
                self.whole = self._settle()
                self._stop()
        finally:
            self._close()

    def _settle(self) -> bool:
        """Wait until all that has passed is here; bounded, for others may never stop talking.

        False if that cannot be said, for tcpdump did not answer in time.
        """
        end = time.monotonic() + SETTLE_DEADLINE_S
        first = before = self._ask()
        steady = 0
        while before is not None and first is not None:
            time.sleep(QUIET_S)
            now = self._ask()
            if now is None:
                break
            steady = steady + 1 if now == before else 0
            # What came between tcpdump's opening of the device and its filter is counted, and
            # never written: a difference that stays is that.
            unread = now.captured + now.dropped < now.received and steady < STEADY_LOOKS
            here = len(self.records) >= now.captured
            late = time.monotonic() > end and now.captured >= first.received
            if here and (late or (steady and not unread)):
                return True
            if time.monotonic() > end + ANSWER_DEADLINE_S:
                break
            before = now
        return not self.running  # it has ended by itself: full

    def _ask(self) -> Figures | None:
        """tcpdump's figures of now; None if it has ended or does not answer."""
        asked = len(FIGURES.findall(self.said))
        if self._command is None or not self.running:
            return None
        self._command.signal(signal.SIGUSR1)
        self._wait(lambda: len(FIGURES.findall(self.said)) > asked, ANSWER_DEADLINE_S)
        return self.figures if len(FIGURES.findall(self.said)) > asked else None

    def _stop(self) -> None:
        """Ask tcpdump to end, and wait for its last words."""
        if self._command is not None:
            self._command.signal(signal.SIGINT)
            self._wait(lambda: False, ANSWER_DEADLINE_S)

    def _close(self) -> None:
        """End the thread and, if it still runs, the command; may be called twice."""
        self._closing.set()
        try:
            if self._thread is not None:
                self._thread.join(2)
        finally:
            with contextlib.suppress(BackendError):  # the lab is gone, and tcpdump with it
                self._stack.close()

    def _wait(self, reached: Callable[[], bool], deadline_s: float) -> None:
        """Until something is reached, the listening has ended, or the deadline."""
        with self._news:
            self._news.wait_for(lambda: reached() or not self.running, deadline_s)

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
            self.failed = error
        finally:
            with self._news:
                self._closing.set()
                self._news.notify_all()

    def _take(self, stream: str, data: bytes) -> None:
        if stream == "stdout":
            self.records += self.reader.feed(data)
            return
        self.said += data.decode(errors="replace")
        for found in FIGURES.findall(self.said)[-1:]:
            self.figures = Figures(*map(int, found))
