"""Faults on a host's link: loss, delay, rate, link down; always reversible.

The fault sits on the switch's end of the host's cable (``v-NAME`` in the guest), so it meets what
the network carries *to* the host, plus on the host's own eth0, so it meets what the host sends.
netem really drops rxe's packets; a NIC that speaks RoCE in hardware would not notice it.
"""

from __future__ import annotations

import contextlib

from .errors import LabGone, UsageError
from .hostside.errands import FORMS, Settings, inside
from .hostside.errands import fault_plan as plan
from .remote import Remote

__all__ = ["Fault", "apply", "clear", "parse", "plan"]

SAMPLES = {
    "loss": "a percentage such as 5%",
    "delay": "a time such as 10ms",
    "rate": "a rate such as 100mbit",
}


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
        elif key not in FORMS:
            raise UsageError(
                f"There is no fault {key!r}.",
                next_step="Give loss=5%, delay=10ms, rate=100mbit, down or clear.",
            )
        elif not FORMS[key].match(str(value)):
            raise UsageError(f"{key}={value} cannot be read; {key} takes {SAMPLES[key]}.")
        elif key == "loss" and float(str(value).rstrip("%")) > 100:
            raise UsageError("More than 100% cannot be lost.", next_step="Give for example loss=5%")
    if "clear" in settings and len(settings) > 1:
        raise UsageError(
            "clear stands alone: it undoes all faults of a host.", next_step="Give just: clear"
        )
    return settings


def apply(remote: Remote, host: str, settings: Settings) -> None:
    """Put a fault on a host's link; it stays until :func:`clear`, or the lab's end."""
    words = [key if value is True else f"{key}={value}" for key, value in check(settings).items()]
    remote.run("errand", ["fault", *words], host=host)


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
        return [" ".join(inside(*step)) for step in plan(self.host, self.settings)]

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
