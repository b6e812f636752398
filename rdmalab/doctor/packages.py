"""What the operating system has to give, as one table, and how each package manager says it.

Pure data and pure functions, standard library only: :mod:`rdmalab.doctor` runs before anything
is installed. Python packages are not here; they stand in ``pyproject.toml``.

>>> install_command("apt-get", ["kmod"])[-1]
'kmod'
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

__all__ = [
    "MANAGERS",
    "NEEDS",
    "Need",
    "install_command",
    "missing",
    "names_for",
    "present",
    "program",
    "qemu_program",
]


class Need(NamedTuple):
    """Something of the operating system's, how to see that it is there, and who packages it.

    ``probe`` is a program on PATH (``/usr/sbin`` counts), an absolute path of a file,
    ``python:MODULE`` for a module of this very Python or ``lib:NAME`` for a library that can be
    loaded. An empty package name means that this
    package manager has none. ``kind`` is ``run`` (to start hosts), ``setup`` (to set up a checkout,
    or hosts on this machine's own kernel), ``build`` (to build the guest image) or ``test``.
    """

    kind: str
    probe: str
    apt: str
    dnf: str = ""
    pacman: str = ""
    brew: str = ""


_ARM = platform.machine() in ("aarch64", "arm64")
_QEMU = Need(
    "run",
    "qemu-system-x86_64",
    "qemu-system-x86",
    "qemu-system-x86-core",
    "qemu-system-x86",
    "qemu",
)
_QEMU_ARM = Need(
    "run",
    "qemu-system-aarch64",
    "qemu-system-arm",
    "qemu-system-aarch64-core",
    "qemu-system-aarch64",
    "qemu",
)

NEEDS: tuple[Need, ...] = (
    _QEMU_ARM if _ARM else _QEMU,
    Need("setup", "python:ensurepip", "python3-venv"),
    Need("setup", "ip", "iproute2", "iproute", "iproute2"),
    Need("setup", "modprobe", "kmod", "kmod", "kmod"),
    Need("build", "mmdebstrap", "mmdebstrap", "mmdebstrap"),
    Need("build", "mkfs.erofs", "erofs-utils", "erofs-utils", "erofs-utils", "erofs-utils"),
    Need("build", "newuidmap", "uidmap", "shadow-utils", "shadow"),
    Need("build", "unshare", "util-linux", "util-linux", "util-linux"),
    Need("build", "xz", "xz-utils", "xz", "xz", "xz"),
    Need("build", "zstd", "zstd", "zstd", "zstd", "zstd"),
    Need("build", "fakeroot", "fakeroot", "fakeroot", "fakeroot"),
    Need("build", "fakechroot", "fakechroot", "fakechroot", "fakechroot"),
    Need(
        "build",
        "/usr/share/keyrings/debian-archive-keyring.gpg",
        "debian-archive-keyring",
        "debian-keyring",
        "debian-archive-keyring",
    ),
    Need("test", "chromium", "chromium", "chromium", "chromium", "chromium"),
    Need("test", "lib:libatomic.so.1", "libatomic1", "libatomic", "gcc-libs"),  # playwright's node
    Need("test", "cpio", "cpio", "cpio", "cpio", "cpio"),
    Need("test", "tshark", "tshark", "wireshark-cli", "wireshark-cli", "wireshark"),
    Need("test", "sudo", "sudo", "sudo", "sudo"),
    Need("test", "setpriv", "util-linux", "util-linux", "util-linux"),
)

# What runs each package manager without questions, up to where the package names go.
MANAGERS: dict[str, tuple[str, ...]] = {
    "apt-get": (
        "env",
        "DEBIAN_FRONTEND=noninteractive",
        "apt-get",
        "-q",
        "-y",
        "-o",
        "DPkg::Lock::Timeout=300",  # another installation may be running on a new machine
        "install",
        "--no-install-recommends",
    ),
    "dnf": ("dnf", "install", "-y"),
    "pacman": ("pacman", "-S", "--needed"),
    "brew": ("brew", "install"),
}


def qemu_program() -> str:
    """The QEMU that emulates this machine's own architecture; RDMALAB_QEMU names another one."""
    return os.environ.get("RDMALAB_QEMU") or NEEDS[0].probe


def install_command(manager: str, packages: Iterable[str]) -> list[str]:
    """The command line that installs ``packages`` (without sudo)."""
    return [*MANAGERS[manager], *packages]


def names_for(manager: str, needs: Iterable[Need]) -> list[str]:
    """The packages of ``needs`` in the words of ``manager``, each once, in the table's order."""
    column = "apt" if manager == "apt-get" else manager
    names = [str(getattr(need, column)) for need in needs]
    return list(dict.fromkeys(name for name in names if name))


def missing(test: bool = False) -> list[Need]:
    """What this machine lacks to build the image and start hosts, and with ``test`` to test."""
    needs = [need for need in NEEDS if test or need.kind != "test"]
    probes = {need: need.probe for need in needs} | {NEEDS[0]: qemu_program()}
    return [need for need, probe in probes.items() if not present(probe)]


def present(probe: str) -> bool:
    """Is the thing that a :class:`Need` names there?"""
    if probe.startswith("/"):
        return Path(probe).exists()
    if probe.startswith("python:"):
        return importlib.util.find_spec(probe.removeprefix("python:")) is not None
    if probe.startswith("lib:"):
        try:
            ctypes.CDLL(probe.removeprefix("lib:"))
        except OSError:
            return False
        return True
    return program(probe) is not None


def program(name: str) -> str | None:
    """Where a program is; an ordinary user's PATH often lacks the folders of administrators."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    return shutil.which(name, path=path)
