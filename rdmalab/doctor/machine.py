"""What this machine is: processor, memory, disk, limits; and how all of the doctor looks at things.

Every function only looks, and answers with one :class:`Check`. ``root`` is the tree to look at;
tests and chroots give another one than ``/``. Standard library only (see :mod:`rdmalab.doctor`).
"""

from __future__ import annotations

import getpass
import os
import platform
import re
import resource
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from .. import paths
from ..errors import MachineError

__all__ = [
    "Check",
    "arch",
    "available_memory",
    "control_groups",
    "disk",
    "memlock",
    "memory",
    "memory_groups",
    "user_namespaces",
]

MIB = 1024 * 1024
MEMORY_NEEDED_BYTES = 700 * MIB  # a lab with two hosts; the limit that the project promises
MEMORY_WANTED_BYTES = 2048 * MIB  # with JupyterLab and a browser beside it
DISK_NEEDED_BYTES = 1024 * MIB  # image and snapshot
DISK_WANTED_BYTES = 3072 * MIB  # room to build the image as well
ROOT = Path("/")


class Check(NamedTuple):
    """One line of the doctor's answer.

    ``status`` is ``ok``, ``warn`` (works, with a limit that ``detail`` states) or ``fail``.
    ``code`` is for programs: it stays the same when the wording changes. ``fix`` is the one next
    step, empty where nothing is to be done.
    """

    check: str
    status: str
    detail: str
    fix: str = ""
    code: str = ""


def arch(machine: str = "") -> Check:
    """Is there a guest image recipe for this processor?"""
    machine = machine or platform.machine()
    if machine in ("x86_64", "amd64"):
        return Check("arch", "ok", f"{machine}, {os.cpu_count()} cores", code="arch_ok")
    if machine in ("aarch64", "arm64"):
        detail = f"{machine}: written, but not tested by the project"
        return Check(
            "arch", "warn", detail, "Report what `rdmalab selftest` says.", "arch_untested"
        )
    detail = f"{machine}: there is no guest image for this processor"
    return Check(
        "arch", "fail", detail, "Use a machine with x86_64 or aarch64.", "arch_unsupported"
    )


def memory(root: Path = ROOT) -> Check:
    """Is there memory for a lab with two hosts, within the limits of the container or service?"""
    free_bytes, limit = available_memory(root)
    detail = f"{free_bytes // MIB:,} MiB free{limit}"
    step = "Close programs, or raise the limit of this machine or container."
    if free_bytes < MEMORY_NEEDED_BYTES:
        detail += f"; two hosts need {MEMORY_NEEDED_BYTES // MIB} MiB"
        return Check("memory", "fail", detail, step, "memory_short")
    if free_bytes < MEMORY_WANTED_BYTES:
        detail += ": enough for two hosts, tight with a browser beside them"
        return Check("memory", "warn", detail, step, "memory_tight")
    return Check("memory", "ok", detail, code="memory_ok")


def available_memory(root: Path = ROOT) -> tuple[int, str]:
    """Bytes that programs started now can have, and in words which limit decides that.

    The smallest of the kernel's MemAvailable and of what each control group above this process
    (cgroup v2 or v1) leaves below its limit.
    """
    found = re.search(r"MemAvailable:\s+(\d+) kB", read(root / "proc/meminfo"))
    free_bytes, which = (int(found.group(1)) * 1024 if found else 0), ""
    for folder, limit_name, usage_name in memory_groups(root):
        limit, usage = read(folder / limit_name), read(folder / usage_name)
        if not (limit.isdigit() and usage.isdigit()):
            continue  # "max", or no such group
        left_bytes = int(limit) - int(usage) + _reclaimable_bytes(folder)
        if left_bytes < free_bytes:
            free_bytes = max(left_bytes, 0)
            which = f" of the {int(limit) // MIB:,} MiB that its control group may have"
    return free_bytes, which


def memory_groups(root: Path) -> list[tuple[Path, str, str]]:
    """(folder, limit file, usage file) of each memory control group from our own to the root."""
    names = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes")}
    names[2] = ("memory.max", "memory.current")
    return [(folder, *names[version]) for folder, version in control_groups(root, "memory")]


def control_groups(root: Path, controller: str) -> list[tuple[Path, int]]:
    """Folder and version (1 or 2) of each control group from our own to the root.

    In a container our own may be the one that is mounted at the root.
    """
    base, groups = root / "sys/fs/cgroup", []
    for line in read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            tops, version = [base, base / "unified"], 2
        elif controller in controllers.split(","):
            tops, version = [base / controller], 1
        else:
            continue
        for top in tops:
            own = top / path.strip("/")
            above = [folder for folder in own.parents if folder == top or top in folder.parents]
            groups += [(folder, version) for folder in (own, *above)]
    return groups


def _reclaimable_bytes(folder: Path) -> int:
    """Page cache that counts as used in a control group but is given up on demand."""
    found = re.search(r"^(?:total_)?inactive_file (\d+)", read(folder / "memory.stat"), re.M)
    return int(found.group(1)) if found else 0


def disk() -> Check:
    """Is there room in the cache folder for the image and the snapshots?"""
    try:
        folder = paths.cache_dir()
        free_bytes = shutil.disk_usage(folder).free
    except (OSError, MachineError) as error:
        step = "Set RDMALAB_CACHE_DIR to a folder that you can write."
        detail = getattr(error, "what", str(error))
        return Check("disk", "fail", detail, step, "cache_unwritable")
    detail = f"{free_bytes // MIB:,} MiB free in {folder}"
    step = "Free some, or set RDMALAB_CACHE_DIR to a folder on a larger disk."
    if free_bytes < DISK_NEEDED_BYTES:
        detail += f"; {DISK_NEEDED_BYTES // MIB:,} MiB are needed"
        return Check("disk", "fail", detail, step, "disk_short")
    if free_bytes < DISK_WANTED_BYTES:
        return Check("disk", "warn", f"{detail}: tight for building an image", step, "disk_tight")
    return Check("disk", "ok", detail, code="disk_ok")


def memlock(local: bool = False) -> Check:
    """How much memory may a program pin? Only hosts of the local backend live under this limit."""
    soft_bytes = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if soft_bytes == resource.RLIM_INFINITY:
        return Check("memlock", "ok", "programs may pin any amount of memory", code="memlock_ok")
    detail = f"programs may pin {soft_bytes // 1024:,} KiB ({soft_bytes / MIB:,.4g} MiB) of memory"
    if local and soft_bytes < 64 * MIB:
        detail += ": larger memory regions fail with ENOMEM"
        step = (
            "Raise memlock in /etc/security/limits.conf (its unit and that of `ulimit -l` is KiB,"
            " the unit of Docker's --ulimit is bytes)."
        )
        return Check("memlock", "warn", detail, step, "memlock_low")
    note = "" if local else "; hosts in the VM have a limit of their own"
    return Check("memlock", "ok", detail + note, code="memlock_ok")


def user_namespaces(root: Path = ROOT) -> Check:
    """May this user make the namespaces in which an image is built without root?"""
    if os.geteuid() == 0:
        return Check("userns", "ok", "not needed by root to build the image", code="userns_ok")
    slower = "so the image is built another way"
    forbidding = {
        "kernel/unprivileged_userns_clone": "0",
        "user/max_user_namespaces": "0",
        "kernel/apparmor_restrict_unprivileged_userns": "1",
    }
    for name, value in forbidding.items():
        if read(root / "proc/sys" / name) == value:
            detail = f"user namespaces are switched off ({name} = {value}), {slower}"
            return Check("userns", "warn", detail, _sysctl_step(name), "userns_off")
    own_line = re.compile(rf"^({re.escape(user_name())}|{os.getuid()}):", re.M)
    if not own_line.search(read(root / "etc/subuid")):
        detail = f"you have no range of ids in /etc/subuid, {slower}"
        ranges = "--add-subuids 100000-165535 --add-subgids 100000-165535"
        step = f"`sudo usermod {ranges} {user_name()}`"
        return Check("userns", "warn", detail, step, "userns_no_range")
    return Check("userns", "ok", "images are built in a user namespace", code="userns_ok")


def _sysctl_step(name: str) -> str:
    value = {"user/max_user_namespaces": 15000, "kernel/unprivileged_userns_clone": 1}.get(name, 0)
    return f"`sudo sysctl {name.replace('/', '.')}={value}`"


def read(path: Path) -> str:
    """A small file's text without the spaces around it; nothing where it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def run(command: list[str], timeout_s: float = 10) -> tuple[int, str]:
    """Exit code and everything that the command printed; 127 where it does not start."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 124, f"no answer within {timeout_s:g} s"
    except OSError as error:
        return 127, str(error.strerror)
    return done.returncode, done.stdout.strip()


def first_line(text: str) -> str:
    """The first line of a program's output, for a message of one line."""
    return text.splitlines()[0].strip() if text else ""


def user_name() -> str:
    """This user's name, or the number where it has none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
