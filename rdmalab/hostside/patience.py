"""How a program waits that polls: it yields, and naps when nothing has come for a while.

The device is software and wants the processor on which we poll; ``sched_yield`` gives it away. On
a machine that is busy otherwise two pollers that only yield hold both virtual processors, and what
they wait for comes late. A nap between polls lets it come (docs/decisions.md).
"""

from __future__ import annotations

import os
import time

__all__ = ["SPINS", "rest"]

SPINS = 100  # empty polls, each with a sched_yield; from then on each with a nap
NAP_S = 0.0001


def rest(polls: int, spins: int = SPINS) -> None:
    """Let others run after so many ``polls`` that found nothing; naps begin after ``spins``."""
    if polls < spins:
        os.sched_yield()
    else:
        time.sleep(NAP_S)
