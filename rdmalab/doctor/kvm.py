"""Can this user make virtual machines with KVM? Asked of the device itself, not of its name.

A device node proves nothing: it may be closed to this user, or open and still refuse to make a
machine, or make one whose guest hangs. The first two are found here with the two ioctls that every
user of KVM starts with; the last only by a trial boot, which the microVM backend does. Without
KVM the hosts run under emulation, so nothing here is ever worse than a warning.
"""

from __future__ import annotations

import errno
import fcntl
import grp
import os
import stat
from pathlib import Path

from ..errors import RdmalabError
from .machine import ROOT, Check, user_name

__all__ = ["check", "check_device"]

# /usr/include/linux/kvm.h: _IO(0xAE, n)
KVM_GET_API_VERSION = 0xAE00
KVM_CREATE_VM = 0xAE01
KVM_API_VERSION = 12

EMULATION = "so hosts run under emulation (slower, but all works)"


def check(root: Path = ROOT) -> Check:
    """The device, and then the proof by a trial boot where there is an image to boot."""
    chosen = os.environ.get("RDMALAB_ACCEL", "")
    if chosen in ("tcg", "kvm"):
        return Check("kvm", "ok", f"not looked at: RDMALAB_ACCEL={chosen}", code="kvm_overridden")
    device = check_device(root / "dev/kvm")
    if device.status != "ok" or root != ROOT:
        return device
    return _proof() or device


def _proof() -> Check | None:
    """What a trial boot says (seconds the first time, then remembered); None without an image.

    The microVM's modules stand above the doctor: they are imported only here, when asked.
    """
    try:
        from .. import image, qemu

        found = image.find_image()
        if found is None:
            return None
        verdict = qemu.kvm_verdict(found, qemu.find_qemu())
    except (ImportError, OSError, RdmalabError):
        return None  # the checks of QEMU and of the image say why
    if verdict.name == "kvm":
        return Check("kvm", "ok", f"KVM works: {verdict.why}", code="kvm_ok")
    step = "Nothing here: a guest does not run under this machine's KVM, and does without it."
    return Check("kvm", "warn", f"{verdict.why}, {EMULATION}", step, "kvm_hangs")


def check_device(node: Path = Path("/dev/kvm")) -> Check:
    """Is the device there, may this user open it, and does it make a virtual machine?"""
    try:
        fd = os.open(node, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        step = (
            "To be faster, switch virtualization on in the firmware or, where this is itself a"
            " virtual machine, nested virtualization in the one below."
        )
        return Check("kvm", "warn", f"{node} does not exist, {EMULATION}", step, "kvm_missing")
    except OSError as error:
        return _not_opened(node, error)
    try:
        fault = _fault(fd)
    finally:
        os.close(fd)
    if fault:
        step = "Nothing here; where this is a virtual machine, the one below may offer nested KVM."
        return Check("kvm", "warn", f"{node} opens, but {fault}, {EMULATION}", step, "kvm_broken")
    detail = (
        f"{node} makes virtual machines; a trial boot at the first `rdmalab up` proves the rest"
    )
    return Check("kvm", "ok", detail, code="kvm_unproved")


def _not_opened(node: Path, error: OSError) -> Check:
    if error.errno not in (errno.EACCES, errno.EPERM):
        detail = f"{node} does not open ({error.strerror}), {EMULATION}"
        step = "Load the kernel's KVM module: `sudo modprobe kvm_intel` or `sudo modprobe kvm_amd`."
        return Check("kvm", "warn", detail, step, "kvm_broken")
    try:
        info = node.stat()
    except OSError:  # its folder is closed as well
        detail = f"{node} may not be opened by you, {EMULATION}"
        return Check("kvm", "warn", detail, _group_step("kvm"), "kvm_permission")
    detail = f"{node} ({mode_and_owner(info)}) may not be opened by you, {EMULATION}"
    return Check("kvm", "warn", detail, _permission_step(info), "kvm_permission")


def _permission_step(info: os.stat_result) -> str:
    """How an administrator gives this user the device without giving it to everybody."""
    if info.st_gid != 0 and info.st_mode & stat.S_IRGRP and info.st_mode & stat.S_IWGRP:
        return _group_step(group_name(info.st_gid))
    rule = 'a udev rule with KERNEL=="kvm", GROUP="kvm", MODE="0660"'
    return f"Give the device to the group kvm ({rule}). {_group_step('kvm')}"


def _group_step(group: str) -> str:
    return f"Join its group: `sudo usermod -aG {group} {user_name()}`, then log in again."


def _fault(fd: int) -> str:
    """What is wrong with the opened device, or nothing."""
    try:
        version = fcntl.ioctl(fd, KVM_GET_API_VERSION, 0)
        if version != KVM_API_VERSION:
            return f"speaks version {version} of KVM's interface instead of {KVM_API_VERSION}"
        os.close(fcntl.ioctl(fd, KVM_CREATE_VM, 0))
    except OSError as error:
        return f"makes no virtual machine ({errno.errorcode.get(error.errno or 0, error.errno)})"
    return ""


def mode_and_owner(info: os.stat_result) -> str:
    """As in ``0660 root:kvm``."""
    owner = "root" if info.st_uid == 0 else str(info.st_uid)
    return f"{stat.S_IMODE(info.st_mode):04o} {owner}:{group_name(info.st_gid)}"


def group_name(gid: int) -> str:
    """A group's name, or its number where it has none."""
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
