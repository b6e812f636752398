"""What a container's or service's limits mean for a lab: heeded before, explained after.

Nobody is told when the kernel ends a process for its control group's limit: it gets SIGKILL, and
the group counts one ``oom_kill`` more.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from .doctor.machine import ROOT, available_memory, control_groups, memory_groups, read
from .errors import MachineError

__all__ = ["QEMU_MIB", "check_room", "kills", "processors"]

QEMU_MIB = 60  # beside the guest's memory: QEMU itself and the code that it translates
WHO_SETS_IT = "docker run --memory, RDMALAB_MEMORY of docker/hub/compose.yaml, a pod's limits"


def check_room(ram_mib: int, root: Path = ROOT) -> None:
    """Raise :class:`MachineError` if the control group has no room for a guest of ``ram_mib``.

    Only a group's limit refuses. A machine that is short of memory itself can swap.
    """
    free_bytes, limit = available_memory(root)
    needed_mib = ram_mib + QEMU_MIB
    if limit and free_bytes < needed_mib << 20:
        raise MachineError(
            f"These hosts need {needed_mib} MiB of memory, and {free_bytes >> 20} MiB are free"
            f"{limit}.",
            next_step=f"Shut down other notebooks' kernels, or raise the limit ({WHO_SETS_IT}).",
        )


def processors(root: Path = ROOT) -> int:
    """How many processors this process may keep busy: of the machine, and of its control groups."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    shares = [float(count or 1)]
    for folder, version in control_groups(root, "cpu"):
        if version == 2:
            words = read(folder / "cpu.max").split()
        else:
            words = [read(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        if len(words) == 2 and all(word.isdigit() for word in words):  # "max" and -1: no limit
            shares.append(int(words[0]) / int(words[1]))
    return max(1, int(min(shares)))


def kills(root: Path = ROOT) -> str:
    """A sentence if processes of our control group were ended for its memory limit, else ``""``."""
    for folder, limit_name, _ in memory_groups(root):
        counts = read(folder / "memory.events") + read(folder / "memory.oom_control")
        found = re.search(r"^oom_kill (\d+)", counts, re.M)
        limit = read(folder / limit_name).strip()
        if found and int(found[1]) and limit.isdigit():
            times = f"{found[1]} times" if int(found[1]) > 1 else "once"
            return (
                f" The kernel has ended processes here {times} because the memory limit of"
                f" {int(limit) >> 20} MiB was reached ({WHO_SETS_IT})."
            )
    return ""
