"""A sign of life while a cell runs: a hub must not take a long silent cell for an idle server.

JupyterHub's culler knows of activity what the notebook's kernel publishes. A cell that waits for a
host, or sleeps, publishes nothing. So every :data:`PERIOD_S` seconds of a cell the kernel says once
more that it is busy: a ``status`` message, of which nobody sees anything.
"""

from __future__ import annotations

import threading
from typing import Any

__all__ = ["PERIOD_S", "watch"]

PERIOD_S = 30.0  # cullers look every few minutes


def watch(ip: Any) -> None:
    """Give signs of life for each of this shell's cells; once, however often it is called."""
    kernel = getattr(ip, "kernel", None)
    if kernel is None or getattr(ip, "rdmalab_pulse", None):
        return  # a terminal has no culler
    ip.rdmalab_pulse = pulse = Pulse(kernel)
    ip.events.register("pre_run_cell", pulse.begin)
    ip.events.register("post_run_cell", pulse.end)


class Pulse:
    """The signs of life of one kernel."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._over = threading.Event()

    def begin(self, *_: Any) -> None:
        """A cell begins: a thread of its own beats until it has ended."""
        self._over.set()
        self._over = over = threading.Event()
        request = self._kernel.get_parent("shell")
        threading.Thread(
            target=self._beat, args=(over, request), name="rdmalab-pulse", daemon=True
        ).start()

    def end(self, *_: Any) -> None:
        """The cell has ended."""
        self._over.set()

    def _beat(self, over: threading.Event, request: dict[str, Any]) -> None:
        while not over.wait(PERIOD_S):
            self._kernel.session.send(
                self._kernel.iopub_socket, "status", {"execution_state": "busy"}, parent=request
            )
