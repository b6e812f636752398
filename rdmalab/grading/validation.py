"""nbgrader's Validate button: the notebook is run on fresh hosts, beside those of the open one.

On the hosts of the open notebook a task that was emptied again would pass, since what it once made
there is still there; and the run would disturb what the learner has at hand.
"""

from __future__ import annotations

import atexit
import os

from .. import lab as labs

__all__ = ["take_fresh_hosts"]


def take_fresh_hosts() -> None:
    """Let this kernel's lab be one of its own, which ends with it.

    A server validates one notebook at a time, so that what a killed one has left is found by name.
    """
    name = f"validate-{os.getppid()}"
    os.environ["RDMALAB_LAB"] = name
    labs.down(name)
    atexit.register(labs.down, name)
