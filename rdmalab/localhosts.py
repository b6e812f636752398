"""The ``local`` backend: hosts as processes on this machine's own RDMA devices.

Soft-RoCE of any kernel, or a real NIC. There is no wire of the lab's own, no network namespace and
no right to any of it: all hosts see this machine's network, files and processes, faults on
the link are refused, and isolation is only what the devices themselves enforce (protection
domains, keys). Hosts share the first usable device, or have one each:

    RDMALAB_DEVICES=rxe0             rdmalab up --backend local     both on rxe0
    RDMALAB_DEVICES=mlx5_0,mlx5_1    rdmalab up --backend local     alice on the first, bob on ...

Each host's first process runs on the system's Python, which has Debian's pyverbs and ipykernel;
``RDMALAB_PYTHON`` names another one.
"""

from __future__ import annotations

import dataclasses
import platform
import time

from . import differences, microvm, stewards
from .doctor.ports import Port, choose, host_python, proof, wanted
from .errors import MachineError
from .state import LabState
from .stewards import Say
from .topology import HostPlan

__all__ = ["OTHER_HOSTS", "runs", "start", "stop"]

OTHER_HOSTS = microvm.OTHER_HOSTS
runs = stewards.runs
stop = stewards.stop


def start(lab: str, hosts: list[HostPlan], say: Say) -> LabState:
    """Bring the hosts up; writes their state file and returns what is in it.

    Raises :class:`~rdmalab.errors.MachineError` where this machine has no device that works, and
    :class:`~rdmalab.errors.BackendError`; then nothing of the lab is left.
    """
    begin = time.monotonic()
    stewards.no_desk(hosts, "local")
    python, ports = needs(hosts)
    seated = [sit(host, ports[index % len(ports)]) for index, host in enumerate(hosts)]
    numbers = [ports[index % len(ports)].number for index in range(len(hosts))]
    stop(lab)
    microvm.stop(lab)
    plan = stewards.plan(lab, seated, numbers, python=python)
    try:
        with stewards.launched(plan, seated) as steward:
            steward.expect("listening", say)
            facts = {"lab": lab, "backend": "local", "accel": "native", "begin": begin}
            why = f"hosts are processes on this machine's kernel {platform.release()}"
            state = stewards.finish(steward, {**facts, "accel_why": why}, say)
    except BaseException:
        stop(lab)
        raise
    say(differences.note(state))
    return state


def needs(hosts: list[HostPlan]) -> tuple[str, list[Port]]:
    """The Python and the ports for these hosts, or an error that says what is missing."""
    python, lacking = host_python()
    if lacking:
        raise MachineError(
            f"{python} cannot run hosts: it has no {', '.join(lacking)}.",
            next_step="`rdmalab doctor --backend local` says what to install.",
        )
    ports, why_not = choose(wanted())
    if why_not:
        raise MachineError(why_not, next_step="`rdmalab doctor --backend local` says more.")
    ports = ports[: len(hosts)]
    failed = proof(python, ports)
    if failed:
        seats = " to ".join(dict.fromkeys((ports[0].device, ports[-1].device)))
        raise MachineError(
            f"A message does not get through on {seats}: {failed}.",
            next_step="`rdmalab doctor --backend local` says more.",
        )
    return python, ports


def sit(host: HostPlan, port: Port) -> HostPlan:
    """A host with the address and device that this machine has for it."""
    return dataclasses.replace(host, ip=port.ip, device=port.device)
