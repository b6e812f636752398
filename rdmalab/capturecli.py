"""``rdmalab capture``: what crosses a host's link, decoded as it passes."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from .errors import MachineError
from .hostcli import Json, LabOption, require_host, running_state, say
from .packets import COLUMNS, Packet, cells

if TYPE_CHECKING:
    from .capture import Capture

__all__ = ["capture", "follow"]

LOOK_S = 0.2  # how often new packets are looked for
WIDTHS = (5, 10, 12, 12, 28, 8, 9, 5, 6)  # of the columns but the last, which is as long as it is


@contextlib.contextmanager
def until_ctrl_c() -> Iterator[threading.Event]:
    """Ctrl-C ends the capture and is no error; yields what it sets. A second one interrupts."""
    ended = threading.Event()
    before = signal.getsignal(signal.SIGINT)

    def end(signum: int, frame: FrameType | None) -> None:
        ended.set()
        signal.signal(signal.SIGINT, before)

    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, end)
    try:
        yield ended
    finally:
        signal.signal(signal.SIGINT, before)


def follow(
    wire: Capture,
    seconds: float | None,
    ended: threading.Event,
    show: Callable[[Packet], None],
    announce: str = "",
) -> None:
    """Run a capture, showing each packet, until Ctrl-C, its time is up, or it is full.

    ``announce`` is said on stderr once it listens.
    """
    shown = 0

    def more() -> None:
        nonlocal shown
        for packet in wire.packets[shown:]:
            show(packet)
            shown += 1

    end = None if seconds is None else time.monotonic() + seconds
    with wire:
        if announce:
            say(announce)
        while wire.running and not ended.wait(LOOK_S):
            more()
            if end is not None and time.monotonic() >= end:
                break
    more()


def line(texts: tuple[str, ...]) -> str:
    """One line of the table as it is printed while it grows."""
    padded = (text.ljust(width) for text, width in zip(texts, WIDTHS, strict=False))
    return "  ".join([*padded, texts[-1]]).rstrip()


def capture(
    host: Annotated[
        str | None, typer.Argument(help="Whose link (default: the first host).")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="A pcap file.")] = None,
    seconds: Annotated[float | None, typer.Option(min=0.1, help="End after so long.")] = None,
    count: Annotated[
        int | None, typer.Option(min=1, max=1_000_000, help="End after so many packets.")
    ] = None,
    lab: LabOption = None,
    as_json: Json = False,
) -> None:
    """Print the RoCEv2 packets on a host's link, decoded, until Ctrl-C."""
    from .capture import MAX_PACKETS, Capture
    from .remote import Remote

    check_file(output)
    state = running_state(lab)
    name = host or state.hosts[0]["name"]
    require_host(state, name)
    with Remote(state) as remote:
        wire = Capture(remote, name, state.hosts, max_packets=count or MAX_PACKETS)
        until = "Ctrl-C ends it" if seconds is None else f"for {seconds:g} s"
        text = f"capturing RoCEv2 packets on {name}'s link; {until}."
        with until_ctrl_c() as ended:
            if as_json:
                follow(wire, seconds, ended, lambda packet: None)
            else:
                follow(wire, seconds, ended, shower(), text)
        report(wire, output, as_json)


def check_file(file: Path | None) -> None:
    """Before anything is captured: can there be such a file?"""
    if file is not None and not (file.absolute().parent.is_dir() and not file.is_dir()):
        raise MachineError(
            f"The capture cannot be written to {file}.",
            next_step="Give a file in a folder that is.",
        )


def shower() -> Callable[[Packet], None]:
    """What prints a packet as a line, below the columns' names."""
    first: list[float] = []

    def show(packet: Packet) -> None:
        if not first:
            first.append(packet.time_s)
            print(line(COLUMNS))
        print(line(cells(packet, first[0])), flush=True)

    return show


def report(wire: Capture, file: Path | None, as_json: bool) -> None:
    """What is to be said at the end; write the file."""
    packets = wire.packets
    saved = None if file is None else str(wire.save(file))
    if as_json:
        document = {"host": wire.host, "packets": [packet.as_dict() for packet in packets]}
        print(json.dumps({**document, "notes": wire.notes, "file": saved}, indent=2))
        return
    for note in packets.notes if packets else ["No RoCEv2 packet was seen.", *packets.notes]:
        print(note)
    if saved is not None:
        print(f"{len(packets)} packets are in {saved}.")
