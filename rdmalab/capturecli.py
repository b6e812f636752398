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

from .capture import Capture
from .errors import MachineError
from .packets import COLUMNS, Packet, cells

__all__ = ["follow", "run"]

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
    capture: Capture, seconds: float | None, ended: threading.Event, show: Callable[[Packet], None]
) -> None:
    """Run a capture, showing each packet, until Ctrl-C, its time is up, or it is full."""
    shown = 0

    def more() -> None:
        nonlocal shown
        for packet in capture.packets[shown:]:
            show(packet)
            shown += 1

    end = None if seconds is None else time.monotonic() + seconds
    with capture:
        while capture.running and not ended.wait(LOOK_S):
            more()
            if end is not None and time.monotonic() >= end:
                break
    more()


def line(texts: tuple[str, ...]) -> str:
    """One line of the table as it is printed while it grows."""
    padded = (text.ljust(width) for text, width in zip(texts, WIDTHS, strict=False))
    return "  ".join([*padded, texts[-1]]).rstrip()


def run(
    capture: Capture,
    file: Path | None,
    seconds: float | None,
    as_json: bool,
    say: Callable[[str], None],
) -> None:
    """The command: print packets as they pass, at last write the file."""
    if file is not None and not (file.absolute().parent.is_dir() and not file.is_dir()):
        raise MachineError(
            f"The capture cannot be written to {file}.",
            next_step="Give a file in a folder that is.",
        )
    first: list[float] = []

    def show(packet: Packet) -> None:
        if not first:
            first.append(packet.time_s)
            print(line(COLUMNS))
        print(line(cells(packet, first[0])), flush=True)

    with until_ctrl_c() as ended:
        if not as_json:
            until = "Ctrl-C ends it" if seconds is None else f"for {seconds:g} s"
            say(f"capturing RoCEv2 packets on {capture.host}'s link; {until}.")
        follow(capture, seconds, ended, (lambda packet: None) if as_json else show)
    packets = capture.packets
    saved = None if file is None else str(capture.save(file))
    if as_json:
        document = {"host": capture.host, "packets": [packet.as_dict() for packet in packets]}
        print(json.dumps({**document, "notes": capture.notes, "file": saved}, indent=2))
        return
    for note in packets.notes if packets else ["No RoCEv2 packet was seen.", *packets.notes]:
        print(note)
    if saved is not None:
        print(f"{len(packets)} packets are in {saved}.")
