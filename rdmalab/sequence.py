"""What happened between hosts, in order: packets with long runs folded, calls, silences.

The rows of a packet ladder as plain data; :mod:`rdmalab.ladder` draws them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .errors import UsageError
from .packets import Packet

__all__ = ["Call", "Row", "rows"]

FOLD_FROM = 4  # equal packets in a row
GAP_MS = 50.0  # of silence that gets a row of its own
PSNS = 1 << 24
MICROSECOND_S = 1e-6  # the resolution of a capture's clock


class Call(NamedTuple):
    """A call on a host. ``when``: a float is a time (``time.time()`` on that host), an int the PSN
    of the first packet that it caused."""

    host: str
    text: str
    when: float | int


@dataclass(frozen=True)
class Row:
    """A line of the ladder: a call, packets (one, or a folded run), or a silence."""

    time_s: float
    packets: tuple[Packet, ...] = ()
    call: Call | None = None
    gap_ms: float = 0.0

    @property
    def label(self) -> str:
        """What stands on the arrow: ``SEND FIRST``, ``62 x RDMA WRITE MIDDLE``."""
        if not self.packets:
            return f"{self.gap_ms:.1f} ms later" if self.gap_ms else ""
        first = self.packets[0]
        many = f"{len(self.packets)} x " if len(self.packets) > 1 else ""
        return ("again: " if first.again else "") + many + first.title

    @property
    def figures(self) -> str:
        """What stands behind the label: PSN, bytes, whether an ACK is asked for."""
        if not self.packets:
            return ""
        first, last = self.packets[0], self.packets[-1]
        parts = []
        if first.psn is not None:
            run = f"..{last.psn}" if last.psn != first.psn else ""
            parts.append(f"PSN {first.psn}{run}")
        if first.payload:
            many = f"{len(self.packets)} x " if len(self.packets) > 1 else ""
            parts.append(f"{many}{first.payload} B")
        if first.ack_request:
            parts.append("ack?")
        if first.syndrome is not None:
            parts.append(f"MSN {first.msn}")
        return ", ".join(parts)

    @property
    def details(self) -> str:
        """A second line: what the further headers say."""
        if len(self.packets) != 1:
            return ""
        said = self.packets[0].details.split("; ")
        return "; ".join(part for part in said if not part.startswith("MSN "))

    def text(self, start_s: float) -> str:
        """The row in words."""
        when = f"{(self.time_s - start_s) * 1e3:9.2f} ms  "
        if self.call is not None:
            return f"{when}{self.call.host}: {self.call.text}"
        if not self.packets:
            return f"{when}({self.label})"
        first = self.packets[0]
        said = [f"{first.src} -> {first.dst}: {self.label}", self.figures, self.details]
        return when + "; ".join(part for part in said if part)


def rows(packets: Sequence[Packet], calls: Iterable[Sequence[Any]] = ()) -> list[Row]:
    """The rows of a ladder, in order of time: packets with runs folded, calls, silences."""
    single = [Row(packet.time_s, (packet,)) for packet in packets]
    marks = [Row(time_of(call, packets), call=call) for call in map(check_call, calls)]
    events = sorted(single + marks, key=lambda row: row.time_s)  # stable
    found: list[Row] = []
    for event in events:
        gap_ms = (event.time_s - found[-1].time_s) * 1e3 if found else 0.0
        if gap_ms >= GAP_MS:
            found.append(Row(event.time_s, gap_ms=gap_ms))
        found.append(event)
    return list(fold(found))


def check_call(call: Sequence[Any]) -> Call:
    """A call as it was given, if it can be one; else :class:`UsageError` that shows a right one."""
    right = (
        len(call) == 3
        and all(isinstance(word, str) for word in call[:2])
        and isinstance(call[2], int | float)
    )
    if not right:
        raise UsageError(
            f"{call!r} is no call.",
            next_step="Give (host, text, time.time() on that host) or (host, text, PSN): "
            '("alice", "post_send", 1000).',
        )
    return Call(*call)


def time_of(call: Call, packets: Sequence[Packet]) -> float:
    """When a call was made; one with a PSN just before the first packet that has it."""
    if isinstance(call.when, float):
        return call.when
    same = [packet for packet in packets if packet.psn == call.when]
    own = [packet for packet in same if packet.src == call.host and not packet.is_response]
    for packet in own or same:
        return packet.time_s - MICROSECOND_S / 2
    raise UsageError(
        f"No packet with PSN {call.when} was captured, so {call.text!r} has no place.",
        next_step="Give the time instead: time.time() on the host, a float.",
    )


def fold(events: Iterable[Row]) -> Iterator[Row]:
    """Runs of equal packets, with rising PSN or with one and the same, as one row each."""
    run: list[Row] = []

    def folded() -> list[Row]:
        if len(run) < FOLD_FROM:
            return run
        return [Row(run[0].time_s, tuple(row.packets[0] for row in run))]

    for event in events:
        if not (run and continues(run, event)):
            yield from folded()
            run = []
        run.append(event)
    yield from folded()


def continues(run: list[Row], row: Row) -> bool:
    """Whether a packet is the next of a run."""
    if not (run[-1].packets and row.packets) or row.details or run[-1].details:
        return False
    a, b = run[-1].packets[0], row.packets[0]
    names = ("src", "dst", "opcode", "transport", "qp", "again", "syndrome", "payload")
    if a.psn is None or b.psn is None or any(getattr(a, n) != getattr(b, n) for n in names):
        return False
    step = (b.psn - a.psn) % PSNS
    if len(run) > 1:
        return step == (a.psn - (run[-2].packets[0].psn or 0)) % PSNS
    return step in (0, 1)
