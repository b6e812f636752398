"""rdmalab: real RDMA verbs on any machine, driven from notebooks.

>>> import rdmalab                                     # doctest: +SKIP
>>> lab = rdmalab.up()                                 # doctest: +SKIP
>>> lab.alice.run("print('hello from', here.name)")    # doctest: +SKIP

In a notebook, ``%load_ext rdmalab`` brings ``%%on HOST``, ``%wait`` and ``%hosts``.
This module imports nothing heavy: names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from . import errors
from .errors import (
    BackendError,
    HostBusy,
    HostDied,
    HostError,
    HostTimeout,
    ImageError,
    LabGone,
    MachineError,
    RdmalabError,
    RemoteError,
    UsageError,
)

__version__ = "0.1.0"

__all__ = [
    "BackendError",
    "Host",
    "HostBusy",
    "HostDied",
    "HostError",
    "HostTimeout",
    "ImageError",
    "Job",
    "Lab",
    "LabGone",
    "MachineError",
    "RdmalabError",
    "RemoteError",
    "UsageError",
    "errors",
    "labs",
    "up",
]

_LATE = {"Host": "lab", "Job": "jobs", "Lab": "lab", "labs": "lab", "up": "lab"}


def __getattr__(name: str) -> Any:
    """Load the heavier names when they are asked for."""
    if name in _LATE:
        return getattr(importlib.import_module(f".{_LATE[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def load_ipython_extension(shell: Any) -> None:
    """``%load_ext rdmalab``: register the magics; the hosts come up at first use."""
    from .magics import load

    if os.environ.get("NBGRADER_EXECUTION") == "validate":  # nbgrader's Validate button
        from .grading.validation import take_fresh_hosts

        take_fresh_hosts()
    load(shell)
