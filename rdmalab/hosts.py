"""A host, and the desk, as objects: what runs code in the guest."""

from __future__ import annotations

import base64
from typing import Any

from .jobs import Job
from .kernels import DEFAULT_TIMEOUT_S, HostKernel
from .outputs import Relay

__all__ = ["Container", "Desk", "Host"]

# An expression that leaves no name behind.
LAY = """
(lambda file, text: (
    file.parent.mkdir(parents=True, exist_ok=True),
    file.write_bytes(__import__("base64").b64decode(text)),
) and None)(__import__("pathlib").Path({name!r}), {text!r})
"""


class Container:
    """What hosts and desk share: a ``name`` and a ``kernel``, which runs code."""

    def __init__(self, kernel: HostKernel) -> None:
        self.kernel, self.name = kernel, kernel.name

    def run(self, code: str, *, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> None:
        """Run code there with its output shown here, as ``%%on`` does.

        Raises what it raised there, and the other errors of :meth:`HostKernel.run`.
        """
        with Relay(self.name) as relay:
            self.kernel.run(code, timeout_s=timeout_s, on_output=relay)

    def start(self, code: str, *, timeout_s: float | None = None) -> Job:
        """Run code beside what follows; ``job.result()`` waits, replays its output, raises."""
        return Job(self.kernel, code, timeout_s)

    def get(self, name: str) -> Any:
        """The value of a variable there: JSON types, bytes, numpy arrays."""
        return self.kernel.get(name)

    def put(self, **values: Any) -> None:
        """Set variables there: ``lab.alice.put(x=3)``."""
        for name, value in values.items():
            self.kernel.put(name, value)

    def interrupt(self) -> None:
        """Stop what runs there now, a blocked verbs call included."""
        self.kernel.interrupt()

    def restart(self) -> None:
        """A fresh kernel; everything of the old one is freed, RDMA resources included."""
        self.kernel.restart()


class Host(Container):
    """One host. ``name``, ``ip``, ``device``, ``gid``, ``gid_index``, ``mtu`` (path MTU, bytes)."""

    def __init__(self, kernel: HostKernel, facts: dict[str, Any]) -> None:
        super().__init__(kernel)
        self.ip: str = facts["ip"]
        self.device: str = facts["device"]
        self.gid: str = facts["gid"]
        self.gid_index: int = facts["gid_index"]
        self.mtu: int = facts["mtu"]

    def __repr__(self) -> str:
        return f"<Host {self.name}: {self.ip}, {self.device}, GID {self.gid}>"


class Desk(Container):
    """The desk: a notebook's own kernel inside the guest, with the hosts and nothing else in reach.

    There ``import rdmalab`` is the package as it is beside a notebook, and ``rdmalab.up()`` gives
    the lab's hosts.
    """

    def lay(self, name: str, data: bytes) -> None:
        """Put a file beside the notebook (``data/hardware.csv``), before any of its cells is run.

        It stays when the kernel is restarted. Up to some MB in all, from the desk's memory.
        """
        text = base64.b64encode(data).decode()
        self.kernel.run(LAY.format(name=name, text=text), store_history=False)

    def __repr__(self) -> str:
        return "<Desk>"
