"""This machine's own RDMA devices: the kernel module rdma_rxe, and what stands on top of it.

Only the local backend needs them; the default one brings its own kernel and never touches these.
Standard library only: a test also runs this on a host, where the same three layers exist.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from pathlib import Path
from typing import NamedTuple

from . import packages
from .machine import ROOT, Check, first_line, read, run

__all__ = ["Device", "inspect_devices", "rdma_devices", "rxe_module"]

MODPROBE_TIMEOUT_S = 20.0
ONLY_LOCAL = "Only `--backend local` needs it: "

# ---------------------------------------------------------------- the kernel module


def rxe_module(root: Path = ROOT, load: bool = False) -> Check:
    """Is ``rdma_rxe`` loaded, there to be loaded, refused, or not there at all?

    Looks and asks ``modprobe`` for a dry run. Only ``load`` really loads it, and only as root.
    """
    if (root / "sys/module/rdma_rxe").is_dir():
        return Check("rxe module", "ok", "rdma_rxe is loaded", code="rxe_loaded")
    modprobe = packages.program("modprobe")
    if modprobe is None:
        detail = "modprobe is not installed, so rdma_rxe cannot be loaded"
        return _module(detail, "`apt-get install kmod`.", "modprobe_missing")
    code, text = run([modprobe, "-n", "-v", "rdma_rxe"], MODPROBE_TIMEOUT_S)
    verdict = classify_modprobe(code, text)
    if verdict == "rxe_present" and load and os.geteuid() == 0:
        code, text = run([modprobe, "rdma_rxe"], MODPROBE_TIMEOUT_S)
        verdict = "rxe_loaded" if code == 0 else classify_modprobe(code, text)
    if verdict == "rxe_loaded":
        return Check("rxe module", "ok", "rdma_rxe is loaded now", code=verdict)
    if verdict == "rxe_present":
        detail = "rdma_rxe is not loaded, but this kernel has it"
        return _module(detail, "`sudo modprobe rdma_rxe`.", verdict)
    if verdict == "rxe_absent":
        return _module(_absent_detail(root), _absent_step(os.uname().release), verdict)
    return _module(f"rdma_rxe is refused: {_refusal(text, root)}", _refused_step(text), verdict)


def _module(detail: str, step: str, code: str) -> Check:
    return Check("rxe module", "warn", detail, ONLY_LOCAL + step, code)


def classify_modprobe(code: int, text: str) -> str:
    """``rxe_present``, ``rxe_absent`` or ``rxe_refused`` from what modprobe answered.

    >>> classify_modprobe(1, "FATAL: Module rdma_rxe not found in directory /lib/modules/7.3")
    'rxe_absent'
    >>> classify_modprobe(1, "could not insert 'rdma_rxe': Operation not permitted")
    'rxe_refused'
    >>> classify_modprobe(0, "install /bin/false")
    'rxe_refused'
    """
    if code == 0:
        switched_off = re.search(r"^install \S*/(false|true)\b", text, re.M)
        return "rxe_refused" if switched_off else "rxe_present"
    return "rxe_absent" if "not found" in text else "rxe_refused"


def _absent_detail(root: Path) -> str:
    if not (root / "proc/modules").exists():
        return "this kernel has no rdma_rxe and loads no modules"
    return f"this kernel ({os.uname().release}) comes without rdma_rxe"


def _absent_step(release: str) -> str:
    """Which package brings the module, by the kernel's own name."""
    if "microsoft" in release.lower():
        return "none; WSL's kernel is built without it."
    if "generic" in release:
        return f"`apt-get install linux-modules-extra-{release}`."
    if "cloud" in release:
        return "boot the distribution's general kernel; cloud kernels come without it."
    return "boot a kernel that has it, as Debian's linux-image-amd64 does."


def _refusal(text: str, root: Path) -> str:
    """What modprobe said, the kernel's own line about it, and the known cause."""
    parts = [first_line(text) or "modprobe gave no reason"]
    code, log = run([packages.program("dmesg") or "dmesg"])
    lines = [line for line in log.splitlines() if re.search(r"rdma_rxe|rxe:", line)]
    if code == 0 and lines:
        parts.append(f"kernel log: {lines[-1].strip()}")
    if not (root / "proc/sys/net/ipv6").exists():
        parts.append("IPv6 is switched off in this kernel, and many versions of rdma_rxe need it")
    return "; ".join(parts)


def _refused_step(text: str) -> str:
    if text.startswith("install "):
        return "remove the line `install rdma_rxe` below /etc/modprobe.d."
    if "not permitted" in text and os.geteuid() != 0:
        return "`sudo modprobe rdma_rxe`; boot without ipv6.disable=1 where that fails too."
    return "boot without ipv6.disable=1 and without a lockdown that forbids the module."


# ---------------------------------------------------------------- the devices, in three layers


class Device(NamedTuple):
    """How far one RDMA device is usable: ``layer`` 0 has no node, 3 is usable from programs."""

    name: str
    layer: int
    code: str
    detail: str


def rdma_devices(root: Path = ROOT) -> Check:
    """Compare kernel, device nodes and libibverbs, and name the first that disagrees."""
    devices = inspect_devices(root)
    if not devices:
        step = ONLY_LOCAL + "`sudo rdma link add rxe0 type rxe netdev eth0`."
        detail = "the kernel has no RDMA device (none in /sys/class/infiniband)"
        return Check("rdma devices", "fail", detail, step, "rdma_none")
    best = max(devices, key=lambda device: device.layer)
    if best.layer == 3:
        usable = ", ".join(device.name for device in devices if device.layer == 3)
        rest = "".join(f"; {device.detail}" for device in devices if device.layer < 3)
        return Check("rdma devices", "ok", f"usable: {usable}{rest}", code="rdma_ok")
    return Check("rdma devices", "fail", best.detail, _device_step(best.code), best.code)


def inspect_devices(root: Path = ROOT) -> list[Device]:
    """Every device that the kernel lists, with the first layer that does not know it."""
    names = sorted(entry.name for entry in _entries(root / "sys/class/infiniband"))
    if not names:
        return []
    nodes = {read(entry / "ibdev"): entry.name for entry in _entries(root / VERBS)}
    known, complaint = listed_by_libibverbs()
    return [_inspect(root, name, nodes.get(name, ""), known, complaint) for name in names]


VERBS = "sys/class/infiniband_verbs"


def _inspect(root: Path, name: str, uverbs: str, known: set[str] | None, complaint: str) -> Device:
    if not uverbs:
        return Device(
            name, 0, "uverbs_missing", f"{name} has no verbs interface (module ib_uverbs)"
        )
    path = f"/dev/infiniband/{uverbs}"
    try:
        os.close(os.open(root / path[1:], os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM):
            return Device(name, 1, "uverbs_permission", f"{name}: you may not open {path}")
        return Device(name, 0, "uverbs_missing", f"{name}: {path} ({error.strerror})")
    if known is None:
        return Device(name, 2, "libibverbs_missing", f"{name}: {path} opens, but {complaint}")
    if name not in known:
        detail = f"{name}: {path} opens, but libibverbs does not list it: {_provider(root, name)}"
        return Device(name, 2, "provider_missing", f"{detail} {complaint}".rstrip())
    return Device(name, 3, "rdma_ok", f"{name} is usable")


def _provider(root: Path, name: str) -> str:
    """Which part of the device's libibverbs provider is not there."""
    software = (root / "sys/class/infiniband" / name / "parent").exists()  # rxe names its netdev
    driver = "rxe" if software else ""
    configured = {
        word
        for entry in _entries(root / "etc/libibverbs.d")
        for word in re.findall(r"^driver\s+(\S+)", read(entry), re.M)
    }
    plugins = {
        found.group(1)
        for folder in ("usr/lib*", "usr/lib*/*")
        for entry in root.glob(f"{folder}/libibverbs/lib*-rdmav*.so")
        if (found := re.match(r"lib(.+)-rdmav\d+\.so", entry.name))
    }
    if driver and driver not in configured:
        return f"/etc/libibverbs.d names no provider {driver}."
    if driver and driver not in plugins:
        return f"the provider's library lib{driver}-rdmav*.so is missing."
    return f"its provider is none of those installed ({', '.join(sorted(plugins)) or 'none'})."


def _device_step(code: str) -> str:
    return {
        "uverbs_missing": "`sudo modprobe ib_uverbs`; in a container, map /dev/infiniband into it.",
        "uverbs_permission": "Ask an administrator to restore the node's mode (by default every"
        " user may open it), or map it into the container with --device.",
        "libibverbs_missing": "`apt-get install libibverbs1 ibverbs-providers ibverbs-utils`.",
        "provider_missing": "`apt-get install --reinstall ibverbs-providers`.",
    }[code]


def listed_by_libibverbs() -> tuple[set[str] | None, str]:
    """The devices that libibverbs lists, and what it complained about; None without the library."""
    command = [sys.executable, "-c", _LIST_DEVICES]
    program = packages.program("ibv_devices")
    code, text = run([program] if program else command)
    if code == 127 or "libibverbs.so.1: cannot open" in text:
        return None, "libibverbs is not installed."
    warnings = [line for line in text.splitlines() if line.startswith("libibverbs:")]
    names = set(re.findall(r"^\s+(\S+)\s+[0-9a-f]{16}\s*$", text, re.M))
    return names, warnings[0] if warnings else ""


# The same table as `ibv_devices`, for machines that have the library but not that program.
_LIST_DEVICES = """
import ctypes
verbs = ctypes.CDLL("libibverbs.so.1")
verbs.ibv_get_device_list.restype = ctypes.POINTER(ctypes.c_void_p)
verbs.ibv_get_device_name.restype = ctypes.c_char_p
verbs.ibv_get_device_name.argtypes = [ctypes.c_void_p]
found = verbs.ibv_get_device_list(None)
while found and found[0]:
    print(f"  {verbs.ibv_get_device_name(found[0]).decode()}  {0:016x}")
    found = ctypes.cast(ctypes.addressof(found.contents) + 8, type(found))
"""


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
