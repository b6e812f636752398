"""What anybody at a lab may have done with the guest's own rights: faults and captures.

Pure data and pure functions. The controller makes the words and shows the lines that they stand
for; the control service in the guest reads the same words, refuses any other, and runs the lines.
So who may ask for an errand still cannot have a command line of his own run.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable

__all__ = ["FORMS", "capture_line", "fault_plan", "line", "settings_in"]

NUMBER = r"([0-9]{1,6}(\.[0-9]{1,6})?)"  # tc takes larger ones too, and makes nonsense of them
FORMS = {
    "loss": re.compile(rf"{NUMBER}%\Z"),
    "delay": re.compile(rf"{NUMBER}(us|ms|s)\Z"),
    "rate": re.compile(rf"(?!0+(\.0+)?[kmg]){NUMBER}(k|m|g)bit\Z"),
}
FLAGS = ("down", "clear")
QUEUE_PACKETS = 20_000  # netem's own limit; its default of 1000 drops on top of what was asked for
ROCE_PORT = 4791
BUFFER_KIB = 8192  # of the guest kernel's memory, for what tcpdump has not read yet
Settings = dict[str, str | bool]


def inside(argv: list[str], netns: str | None) -> list[str]:
    """A command as it is run in a host's network namespace (None: in the guest's)."""
    return ["ip", "netns", "exec", netns, *argv] if netns else argv


def line(
    words: list[str], host: str, inside: Callable[[list[str], str | None], list[str]] = inside
) -> list[str]:
    """The command line for ``["fault", "loss=5%"]`` or ``["capture", "10000", "4352"]``.

    ``host`` must be a host's name; the caller knows which there are. ``inside`` makes of a command
    one that runs in a host's network. Raises ``ValueError``.
    """
    match words:
        case ["fault", *rest]:
            plan = fault_plan(host, settings_in(rest))
            return ["sh", "-c", " && ".join(shlex.join(inside(*step)) for step in plan)]
        case ["capture", max_packets, snaplen]:
            return inside(capture_line(int(max_packets), int(snaplen)), host)
    raise ValueError(f"there is no errand {shlex.join(words)!r}")


def settings_in(words: list[str]) -> Settings:
    """A fault's settings from words such as ``loss=5%`` and ``down``; ``ValueError`` for others."""
    settings: Settings = {}
    for word in words:
        key, sep, value = word.partition("=")
        if not (key in FLAGS if not sep else key in FORMS and FORMS[key].match(value)):
            raise ValueError(f"{word!r} is no fault")
        settings[key] = value if sep else True
    return settings


def fault_plan(host: str, settings: Settings) -> list[tuple[list[str], str | None]]:
    """Commands for the guest, each with the network namespace that it runs in (None: the guest's).

    A fault replaces the one before it, so that applying one twice is the same as once.
    """
    port = f"v-{host}"
    commands: list[tuple[list[str], str | None]] = []
    netem = [word for key in FORMS if key in settings for word in (key, settings[key])]
    for device, netns in ((port, None), ("eth0", host)):
        if netem:
            words = ["tc", "qdisc", "replace", "dev", device, "root", "netem"]
            commands.append(([*words, *map(str, netem), "limit", str(QUEUE_PACKETS)], netns))
        if settings.get("clear"):  # deleting what there is not would fail, so first put something
            commands.append((["tc", "qdisc", "replace", "dev", device, "root", "noqueue"], netns))
            commands.append((["tc", "qdisc", "del", "dev", device, "root"], netns))
    if settings.get("down"):
        commands.append((["ip", "link", "set", port, "down"], None))
    if settings.get("clear"):
        commands.append((["ip", "link", "set", port, "up"], None))
    return commands


def capture_line(max_packets: int, snaplen: int, netdev: str = "eth0") -> list[str]:
    """tcpdump on a host's ``eth0``; ``snaplen``: bytes to keep of each packet."""
    words = ["tcpdump", "-i", netdev, "--no-promiscuous-mode"]
    words += ["--immediate-mode", "--packet-buffered"]  # neither kernel nor tcpdump holds back
    limits = ["-s", str(snaplen), "-B", str(BUFFER_KIB), "-c", str(max_packets)]
    return [*words, *limits, "-w", "-", f"udp dst port {ROCE_PORT}"]
