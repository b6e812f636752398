"""The guest's processors: all but the first wait until the kernel has patched its busiest code.

Linux changes its own instructions when a feature comes into use (a *static key*). It puts a
breakpoint (``int3``) over the old ones meanwhile, for other processors that come by. QEMU 7.2,
whose emulated processors run side by side, may keep a translation of the breakpoint after it has
gone, and the kernel ends with "Oops: int3". It did when the first control group with a memory limit
was made, which patches the memory allocator. So the guest boots with one processor (``maxcpus=1``),
makes such a group, and brings the others up when there is nobody to catch.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

__all__ = ["CGROUPS", "CONTROLLERS", "start_all", "use"]

CGROUPS = Path("/sys/fs/cgroup")
CONTROLLERS = "+pids +memory +rdma"
PROCESSORS = Path("/sys/devices/system/cpu")


def start_all() -> None:
    """Mount the control groups, use the first one, then bring every processor up."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"cgroup2", bytes(CGROUPS), b"cgroup2", ctypes.c_ulong(0), None):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(CGROUPS))
    (CGROUPS / "cgroup.subtree_control").write_text(CONTROLLERS)
    (CGROUPS / "first").mkdir()
    (CGROUPS / "first").rmdir()
    for switch in sorted(PROCESSORS.glob("cpu[0-9]*/online")):
        if switch.read_text().strip() == "0":
            switch.write_text("1")


def use(count: int) -> None:
    """Stop the processors beyond the first ``count``: the machine below may keep no more busy."""
    for switch in sorted(PROCESSORS.glob("cpu[0-9]*/online")):
        number = int(switch.parent.name.removeprefix("cpu"))
        if number >= count and switch.read_text().strip() == "1":
            switch.write_text("0")
