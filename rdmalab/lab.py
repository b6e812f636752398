"""A lab and its hosts as objects, and :func:`up`, which brings them up.

::

    Lab ──┬── Host alice ── kernel with pyverbs, eth0 10.0.0.1, device rxe_alice
          ├── Host bob   ── kernel with pyverbs, eth0 10.0.0.2, device rxe_bob
          └── Desk       ── a notebook's own kernel, where one is graded
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

from . import desk as desks
from . import differences, dockerhosts, localhosts, microvm, state, stewards
from .capture import Capture
from .errors import BackendError, MachineError, UsageError
from .faults import Fault
from .hosts import Desk, Host
from .kernels import HostKernel
from .paths import runtime_dir
from .remote import Remote
from .state import LabState
from .topology import DEFAULT_HOSTS, DEFAULT_LAB, DESK, HOST_MEMORY_MIB, check_lab_id, plan

__all__ = ["BACKENDS", "Host", "Lab", "default_lab", "down", "known", "labs", "running", "up"]

# Name to a module with start, stop, runs and OTHER_HOSTS.
BACKENDS: dict[str, ModuleType] = {
    "vm": microvm,
    "docker": dockerhosts,
    "local": localhosts,
    desks.NAME: desks,
}
CHOICES = [name for name in BACKENDS if name != desks.NAME]  # nobody can ask for a desk's
_open: dict[str, Lab] = {}  # this process's connections, by lab id


class Lab:
    """A running lab: ``lab.alice`` and ``lab["alice"]`` are hosts, ``lab.hosts`` all of them."""

    def __init__(self, lab_state: LabState) -> None:
        self.state = lab_state
        self.id = lab_state.lab
        self.remote = Remote(lab_state)
        self.remote.call("hello")
        self._hosts = {
            facts["name"]: Host(HostKernel(self.remote, facts, HOST_MEMORY_MIB), facts)
            for facts in lab_state.hosts
        }
        self._desk: Desk | None = None
        if lab_state.desk is not None:
            self._desk = Desk(HostKernel(self.remote, lab_state.desk, DESK.memory_mib))

    @property
    def hosts(self) -> list[Host]:
        """All hosts, in order."""
        return list(self._hosts.values())

    @property
    def desk(self) -> Desk:
        """Where a notebook's own kernel runs when it is graded; see :func:`up`."""
        if self._desk is None:
            raise UsageError(
                "This lab has no desk.", next_step='rdmalab.up(lab="ID", desk=True) has one.'
            )
        return self._desk

    def __getitem__(self, name: str) -> Host:
        try:
            return self._hosts[name]
        except KeyError:
            raise UsageError(
                f"This lab has no host {name!r}; it has {', '.join(self._hosts)}.",
                next_step="rdmalab up NAME ... starts others.",
            ) from None

    def __getattr__(self, name: str) -> Host:
        if name.startswith("_") or name not in self.__dict__.get("_hosts", {}):
            raise AttributeError(f"this lab has no host or attribute {name!r}")
        return self._hosts[name]

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._hosts]

    def fault(self, host: str, **settings: Any) -> Fault:
        """A fault on a host's link as a context manager: ``with lab.fault("bob", loss="5%"): ...``.

        ``loss``, ``delay``, ``rate`` as tc-netem(8) takes them, ``down=True``; undone at the end.
        """
        differences.require_faults(self.state)
        return Fault(self.remote, self[host].name, **settings)

    def capture(self, host: str | None = None, **limits: int) -> Capture:
        """What crosses a host's link (default: the first host's), as a context manager.

        ``with lab.capture("bob") as wire: ...``, then ``wire.packets``, ``wire.ladder()`` and
        ``wire.save("x.pcap")``; ``limits`` are those of :class:`~rdmalab.capture.Capture`.
        """
        name = self[host].name if host else self.hosts[0].name
        return Capture(self.remote, name, self.state.hosts, **limits)

    def alive(self) -> bool:
        """Whether the hosts still run."""
        return self.state.alive()

    def close(self) -> None:
        """Drop this process's connections; the hosts run on."""
        for host in self.hosts:
            host.kernel.close()
        if self._desk is not None:
            self._desk.kernel.close()
        self.remote.close()
        if _open.get(self.id) is self:
            del _open[self.id]

    def down(self) -> None:
        """Stop the hosts and remove all that this lab made."""
        down(self.id)

    def __repr__(self) -> str:
        names = ", ".join(self._hosts)
        how = f"{self.state.backend}, {self.state.accel}"
        return f"<Lab {self.id!r} ({how}): {names}>" if self.alive() else f"<Lab {self.id!r}: gone>"


def default_lab() -> str:
    """The lab that is meant when none is named: ``RDMALAB_LAB``, else ``default``."""
    return check_lab_id(os.environ.get("RDMALAB_LAB") or DEFAULT_LAB)


def say(text: str) -> None:
    """Progress: on stderr; in a notebook on stdout, since stderr looks like a fault there."""
    ipython = sys.modules.get("IPython")
    notebook = ipython is not None and ipython.get_ipython() is not None
    print(f"rdmalab: {text}", file=sys.stdout if notebook else sys.stderr, flush=True)


def ensure(
    names: Sequence[str] = (),
    *,
    lab: str | None = None,
    backend: str = "auto",
    desk: bool = False,
    say: Callable[[str], None] = say,
) -> LabState:
    """The state of the lab with these hosts, started if it does not run (see :func:`up`)."""
    lab = default_lab() if lab is None else check_lab_id(lab)
    if backend == "auto":
        backend = os.environ.get("RDMALAB_BACKEND") or "vm"
    name = desks.NAME if desks.is_here() else backend
    if name not in CHOICES and not desks.is_here():
        raise UsageError(
            f"There is no backend {backend!r} in this version; there is: {', '.join(CHOICES)}.",
            next_step="The vm backend works on every machine.",
        )
    hosts = plan(tuple(names) or DEFAULT_HOSTS)
    try:
        with state.locked(lab, say):
            found = running(lab)
            if found is None:
                wanted = [*hosts, DESK] if desk else hosts
                started: LabState = BACKENDS[name].start(lab, wanted, say)
                return started
    except OSError as error:
        raise not_started(lab, error) from None
    have = [host["name"] for host in found.hosts]
    if names and list(names) != have:
        raise BackendError(
            f"The lab {lab!r} runs already, with the hosts {', '.join(have)}.",
            next_step=BACKENDS[found.backend].OTHER_HOSTS,
        )
    if desk and found.desk is None:
        raise BackendError(
            f"The lab {lab!r} runs already, without a desk.",
            next_step=BACKENDS[found.backend].OTHER_HOSTS,
        )
    return found


def not_started(lab: str, error: OSError) -> MachineError:
    """The error for a start that met a full disk, or a folder that may not be written."""
    place = error.filename or runtime_dir()
    free = shutil.disk_usage(runtime_dir()).free
    return MachineError(
        f"The lab {lab!r} could not be started: {error.strerror} ({place});"
        f" {free >> 20} MiB are free in {runtime_dir()}, and a lab needs 1 MiB there.",
        next_step="RDMALAB_RUNTIME_DIR and RDMALAB_CACHE_DIR name other folders.",
    )


def running(lab: str) -> LabState | None:
    """The state of a lab if it runs, else None. What an old state file says is not believed."""
    found = state.read(lab)
    if found is None or found.backend not in BACKENDS:
        return None
    return found if BACKENDS[found.backend].runs(found) else None


def up(
    names: Sequence[str] = (),
    *,
    lab: str | None = None,
    backend: str = "auto",
    desk: bool = False,
    say: Callable[[str], None] = say,
) -> Lab:
    """The lab, running: the one that runs already, or a new one.

    ``names``: hosts (default alice and bob); ``lab``: an id, for several labs at once (default
    ``RDMALAB_LAB`` or ``default``); ``backend``: where the hosts of a new lab live (default
    ``RDMALAB_BACKEND`` or ``vm``); ``desk``: with a place in the guest where a notebook's own
    kernel runs (``lab.desk``), for grading; ``say`` hears the progress of a start. Takes about
    a second when these hosts were started on this machine before. Raises
    :class:`~rdmalab.errors.RdmalabError`.
    """
    found = ensure(names, lab=lab, backend=backend, desk=desk, say=say)
    opened = _open.get(found.lab)
    if opened is not None and opened.state == found:
        return opened
    if opened is not None:
        with contextlib.suppress(BackendError):
            opened.close()
    new = _open[found.lab] = Lab(found)
    return new


def down(lab: str | None = None) -> bool:
    """Stop a lab and remove all that it made, whatever is left. True if there was anything."""
    lab = default_lab() if lab is None else check_lab_id(lab)
    if desks.is_here():
        desks.stop(lab)
    opened = _open.get(lab)
    if opened is not None:
        opened.close()
    with state.locked(lab, say, deadline_s=60):
        ended = [backend.stop(lab) for backend in (dockerhosts, localhosts, microvm)]
        return any(ended)


def labs() -> Iterator[LabState]:
    """The labs of this user that run."""
    for lab in known():
        found = running(lab)
        if found is not None:
            yield found


def known() -> list[str]:
    """All labs of this user of which there is something: a folder, or a process without one."""
    found = (*microvm.guests().values(), *stewards.marked().values())
    return sorted({*state.lab_ids(), *found})
