"""A process's children that have ended, for a first process: it collects orphans, too."""

from __future__ import annotations

import os
from collections.abc import Iterator

__all__ = ["ended"]


def ended() -> Iterator[tuple[int, int]]:
    """Collect all that have ended by now: pid and exit code (negative: the signal's number)."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, os.waitstatus_to_exitcode(status)
