"""Faults on a host's link: loss, delay, rate, link down; always reversible.

The fault sits on the switch's end of the host's cable (``v-NAME`` in the guest), so it meets what
the network carries *to* the host, plus on the host's own eth0, so it meets what the host sends.
netem really drops rxe's packets; a NIC that speaks RoCE in hardware would not notice it.
"""

from __future__ import annotations

import contextlib
import re

from .errors import LabGone, UsageError
from .remote import Remote

__all__ = ["Fault", "apply", "clear", "parse", "plan"]

NUMBER = r"([0-9]{1,6}(\.[0-9]{1,6})?)"  # tc takes larger ones too, and makes nonsense of them
UNITS = {
    "loss": (re.compile(rf"{NUMBER}%\Z"), "a percentage such as 5%"),
    "delay": (re.compile(rf"{NUMBER}(us|ms|s)\Z"), "a time such as 10ms"),
    "rate": (re.compile(rf"(?!0+(\.0+)?[kmg]){NUMBER}(k|m|g)bit\Z"), "a rate such as 100mbit"),
}
QUEUE_PACKETS = 20_000  # netem's own limit; its default of 1000 drops on top of what was asked for
Settings = dict[str, str | bool]


def parse(words: list[str]) -> Settings:
    """Settings from a command line's words: ``loss=5%``, ``delay=10ms``, ``down``, ``clear``."""
    settings: Settings = {}
    for word in words:
        key, sep, value = word.partition("=")
        settings[key] = value if sep else True
    return check(settings)


def check(settings: Settings) -> Settings:
    """The settings, if they can be; else :class:`UsageError` that shows a right one."""
    if not settings:
        raise UsageError(
            "No fault is given.", next_step="Give loss=5%, delay=10ms, rate=100mbit, down or clear."
        )
    for key, value in settings.items():
        if key in ("down", "clear"):
            if value is not True:
                raise UsageError(f"{key} takes no value.", next_step=f"Give just: {key}")
        elif key not in UNITS:
            raise UsageError(
                f"There is no fault {key!r}.",
                next_step="Give loss=5%, delay=10ms, rate=100mbit, down or clear.",
            )
        elif not UNITS[key][0].match(str(value)):
            raise UsageError(f"{key}={value} cannot be read; {key} takes {UNITS[key][1]}.")
        elif key == "loss" and float(str(value).rstrip("%")) > 100:
            raise UsageError("More than 100% cannot be lost.", next_step="Give for example loss=5%")
    if "clear" in settings and len(settings) > 1:
        raise UsageError(
            "clear stands alone: it undoes all faults of a host.", next_step="Give just: clear"
        )
    return settings


def plan(host: str, settings: Settings) -> list[tuple[list[str], str | None]]:
    """Commands for the guest, each with the network namespace that it runs in (None: the guest's).

    A fault replaces the one before it, so that applying one twice is the same as once.
    """
    port = f"v-{host}"
    commands: list[tuple[list[str], str | None]] = []
    netem = [
        word
        for key in ("loss", "delay", "rate")
        if key in settings
        for word in (key, settings[key])
    ]
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


def apply(remote: Remote, host: str, settings: Settings) -> None:
    """Put a fault on a host's link; it stays until :func:`clear`, or the lab's end."""
    for argv, netns in plan(host, check(settings)):
        remote.run("root", argv, host=netns)


def clear(remote: Remote, host: str) -> None:
    """Undo all faults of a host."""
    apply(remote, host, {"clear": True})


class Fault:
    """A fault as a context manager; undone at the end, however it comes.

    ``commands`` shows the raw lines. Entering and leaving may each be done twice.
    """

    def __init__(self, remote: Remote, host: str, **settings: str | bool) -> None:
        self.remote, self.host = remote, host
        self.settings = check(settings)

    @property
    def commands(self) -> list[str]:
        """What is run in the guest, for readers."""
        lines = []
        for argv, netns in plan(self.host, self.settings):
            lines.append(" ".join(["ip netns exec", netns, *argv] if netns else argv))
        return lines

    def __enter__(self) -> Fault:
        try:
            apply(self.remote, self.host, self.settings)
        except BaseException:  # stopped half-way: a fault that nobody would undo
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(LabGone):  # and its faults with it
            clear(self.remote, self.host)

    def __repr__(self) -> str:
        shown = " ".join(
            key if value is True else f"{key}={value}" for key, value in self.settings.items()
        )
        return f"<Fault on {self.host}: {shown}>"
