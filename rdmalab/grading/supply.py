"""Machines for a class: each is used for one submission, and the next is started beside it.

A start takes a second or two of a processor that mostly waits while a submission's cells run. So
there is one machine more than submissions are graded at a time, as long as there are more to come.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from ..errors import MachineError, RdmalabError
from .machine import LabMachine
from .runner import Machine

__all__ = ["Start", "Supply"]

Start = Callable[[Callable[[str], None]], Machine]


@dataclass
class Supply:
    """Starts machines, and knows all that it has started.

    ``submissions``: how many are still to be begun; ``say`` hears a start's progress, at least
    every ten seconds.
    """

    submissions: int = 0
    say: Callable[[str], None] = lambda text: None
    start: Start = LabMachine
    open: list[Machine] = field(default_factory=list)
    ready: Future[Machine] | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    warm: threading.Event = field(default_factory=threading.Event)
    first: threading.Lock = field(default_factory=threading.Lock)
    lock: threading.Lock = field(default_factory=threading.Lock)
    pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="rdmalab-next")
    )

    def begun(self) -> None:
        """One submission fewer is still to be begun."""
        with self.lock:
            self.submissions -= 1

    def fresh(self) -> Machine:
        """A machine that nobody has used. Raises :class:`RdmalabError` if there can be none."""
        with self.lock:
            ready, self.ready = self.ready, None
        machine = None
        if ready is not None:
            with contextlib.suppress(RdmalabError):  # then it is tried once more, and told
                machine = ready.result()
        machine = machine or self.started()
        with self.lock:
            if self.ready is None and self.submissions > 0 and not self.ended.is_set():
                self.ready = self.pool.submit(self.started)
        return machine

    def started(self) -> Machine:
        """Start a machine. The first one is saved for all that follow."""
        with contextlib.nullcontext() if self.warm.is_set() else self.first:
            if self.ended.is_set():
                raise MachineError("interrupted")
            machine = self.start(self.heard)
            self.warm.set()
        with self.lock:
            self.open = [*(m for m in self.open if not m.closed), machine]
            late = self.ended.is_set()
        if late:
            machine.close()
        return machine

    def heard(self, text: str) -> None:
        """Pass on what a start says; an interrupt ends it here."""
        if self.ended.is_set():
            raise MachineError("interrupted")
        self.say(text)

    def stop(self) -> None:
        """End every machine, also those that are used: nobody waits for a cell to finish."""
        self.ended.set()
        self.pool.shutdown(wait=False, cancel_futures=True)
        with self.lock:
            machines = list(self.open)
        for machine in machines:
            machine.close()
        self.pool.shutdown(wait=True)
