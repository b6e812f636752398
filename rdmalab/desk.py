"""The ``desk`` backend: what ``rdmalab.up()`` finds in a notebook that runs inside the guest.

When a notebook is graded, its own kernel runs in the guest, in a container named *desk* beside the
hosts. They run already, and the desk can neither start others nor stop these::

    grader ── Lab.desk ──▶ desk: the notebook's kernel ── rdmalab.up() ──▶ alice, bob
             (vm backend)                                 (this backend)
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NoReturn

from .errors import BackendError
from .state import LabState, lab_folder, process_started, write
from .topology import DEFAULT_LAB, HostPlan

__all__ = ["NAME", "OTHER_HOSTS", "is_here", "runs", "start", "stop", "take"]

NAME = "desk"
OTHER_HOSTS = "A notebook that is graded has these hosts, and lab = rdmalab.up() gives them."
FIRST_PROCESS = 1  # the desk's own: it is there as long as the desk is


def is_here() -> bool:
    """Whether this process runs at the desk of a lab, inside its guest."""
    return bool(os.environ.get("RDMALAB_DESK"))


def take(facts: dict[str, Any]) -> None:
    """Write the state of the lab that this desk belongs to; the guest calls it with its facts.

    ``facts``: ``hosts``, ``control``, ``accel`` and ``accel_why`` as :class:`LabState` has them.
    """
    state = LabState(
        lab=DEFAULT_LAB,
        backend=NAME,
        restored=True,
        ready_s=0.0,
        pid=FIRST_PROCESS,
        started=process_started(FIRST_PROCESS) or 0.0,
        **facts,
    )
    lab_folder(state.lab).mkdir(mode=0o700, parents=True, exist_ok=True)
    write(state)


def start(lab: str, hosts: list[HostPlan], say: Callable[[str], None]) -> NoReturn:
    """Refused: the guest has the hosts that the lab's owner has started."""
    names = ", ".join(host.name for host in hosts)
    raise BackendError(
        f"The lab {lab!r} (hosts {names}) cannot be started here: this notebook runs inside a"
        " lab's own guest, as it does when it is graded.",
        next_step=OTHER_HOSTS,
    )


def stop(lab: str) -> NoReturn:
    """Refused: the hosts belong to the lab's owner."""
    raise BackendError(
        f"The lab {lab!r} cannot be stopped from here: this notebook runs inside a lab's own guest,"
        " as it does when it is graded.",
        next_step="Nothing needs to be stopped: all of it ends with the grading.",
    )


def runs(state: LabState) -> bool:
    """Whether the hosts are there: as long as the desk is."""
    return state.alive()
