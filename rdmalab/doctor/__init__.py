"""Checks this machine and installs what it lacks; runs before anything else is installed.

Standard library only, so that ``python3 -m rdmalab.doctor`` works where there is nothing but
Python. Looking and changing are apart: :func:`run_checks` only looks, :func:`fix` installs.

::

    machine    processor, memory, disk, limits          kvm        can it be used, really?
    software   Python, QEMU, Docker, Jupyter, image     devices    rdma_rxe and RDMA devices
    ports      where hosts of the local backend could sit
    packages   what the system has to give (a table)    installer  --fix
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from . import devices, kvm, machine, ports, software
from .installer import fix
from .machine import ROOT, Check

__all__ = ["BACKENDS", "Check", "fix", "render", "run_checks", "works"]

# What each backend cannot do without. Any other check may warn, but never fails the whole.
ESSENTIAL = {
    "vm": {"python", "arch", "packages", "qemu", "memory", "disk", "jupyter", "image"},
    "docker": {"python", "docker", "docker hosts", "memory", "disk", "jupyter"},
    "local": {"python", "rdma devices", "local hosts", "jupyter"},  # no rxe: a real NIC will do
}
BACKENDS = tuple(ESSENTIAL)


def run_checks(
    backend: str = "vm",
    *,
    system: bool = False,
    test: bool = False,
    load: bool = False,
    root: Path = ROOT,
) -> list[Check]:
    """Look at everything and answer with one :class:`Check` each.

    ``system`` leaves out what pip and ``rdmalab image build`` bring; ``test`` adds what the tests
    need; ``root`` is the tree to look at. Nothing is changed, unless ``load`` allows to load the
    kernel module rdma_rxe (``doctor --fix --backend local``).
    """
    look: list[Callable[[], Check]] = [
        software.python,
        machine.arch,
        lambda: software.system_packages(test),
        software.qemu,
        lambda: kvm.check(root),
        lambda: machine.memory(root),
        machine.disk,
        lambda: machine.memlock(backend == "local"),
        lambda: machine.user_namespaces(root),
        lambda: devices.rxe_module(root, load),
        lambda: devices.rdma_devices(root),
        software.docker,
    ]
    if backend == "docker":
        look.append(lambda: software.docker_hosts(root))
    if backend == "local":
        look.append(lambda: ports.local_hosts(root))
    if not system:
        look += [software.jupyter, software.image]
    return weigh([check() for check in look], backend)


def weigh(checks: Iterable[Check], backend: str) -> list[Check]:
    """What ``backend`` cannot do without may fail; anything else is a warning at worst."""
    return [
        check._replace(status="warn")
        if check.status == "fail" and check.check not in ESSENTIAL[backend]
        else check
        for check in checks
    ]


def works(checks: Iterable[Check]) -> bool:
    """Can the backend that was asked for work here?"""
    return all(check.status != "fail" for check in checks)


def render(checks: Iterable[Check], colour: bool = False) -> str:
    """The answer for people: a line for each check, with the next step after an arrow."""
    paint = {"ok": "\033[32m", "warn": "\033[33m", "fail": "\033[31m"}
    lines = []
    for check in checks:
        status = f"{check.status:4}"
        if colour:
            status = f"{paint[check.status]}{status}\033[0m"
        step = f" -> {check.fix}" if check.fix else ""
        lines.append(f"{status}  {check.check:12}  {check.detail}{step}")
    return "\n".join(lines)
