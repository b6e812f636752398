"""The one tree of errors.

::

    RdmalabError                    anything this kit reports; exit code 1 on the command line
    ├── UsageError                  the caller's words are off; exit code 2
    ├── MachineError                this machine lacks something (QEMU, memory, disk, rights)
    ├── ImageError                  the guest image cannot be built, read or imported
    ├── BackendError                hosts cannot be started, or are gone
    │   └── LabGone                 the lab's virtual machine ended while somebody waited for it
    └── HostError                   something happened on one host; ``.host`` names it
        ├── HostDied                the host's kernel process ended
        ├── HostTimeout             a deadline passed
        ├── HostBusy                the host runs something else and the wait for it ran out
        └── RemoteError             code on the host raised; carries the remote traceback

Every message says what happened, where, the likely cause and the next step. ``next_step``
keeps the last of these apart so that a card or a table can show it on its own.
"""

from __future__ import annotations

__all__ = [
    "BackendError",
    "HostBusy",
    "HostDied",
    "HostError",
    "HostTimeout",
    "ImageError",
    "LabGone",
    "MachineError",
    "RdmalabError",
    "RemoteError",
    "UsageError",
]


class RdmalabError(Exception):
    """Base of all errors of this kit. ``str(error)`` is one plain sentence and the next step."""

    exit_code = 1

    def __init__(self, what: str, *, next_step: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.next_step = next_step

    def __str__(self) -> str:
        return f"{self.what} {self.next_step}".rstrip()

    def _render_traceback_(self) -> list[str]:
        """What IPython shows instead of a traceback: the sentence itself."""
        return [f"{type(self).__name__}: {self}"]


class UsageError(RdmalabError):
    """The caller asked for something that does not exist or cannot be."""

    exit_code = 2


class MachineError(RdmalabError):
    """This machine lacks something: a program, memory, disk space, rights."""


class ImageError(RdmalabError):
    """The guest image cannot be built, read, exported or imported."""


class BackendError(RdmalabError):
    """The hosts cannot be started or stopped."""


class LabGone(BackendError):
    """The lab's virtual machine ended while somebody was waiting for an answer from it."""


class HostError(RdmalabError):
    """Something happened on one host.

    Parameters
    ----------
    host: the host's name, as in ``alice``.
    """

    def __init__(self, host: str, what: str, *, next_step: str = "") -> None:
        super().__init__(f"[{host}] {what}", next_step=next_step)
        self.host = host


class HostDied(HostError):
    """The host's kernel process ended (crash, ``os._exit``, out of memory)."""


class HostTimeout(HostError):
    """What was asked of the host was not done within its deadline."""


class HostBusy(HostError):
    """The host was still running something else when the wait for it ran out."""


class RemoteError(HostError):
    """Code on the host raised.

    ``ename`` and ``evalue`` are the remote exception's name and text, ``remote_traceback`` its
    lines as IPython on the host drew them. Subclasses named like the remote exception are made
    by :func:`remote_error`, so that a notebook shows the name that the learner expects.
    """

    def __init__(self, host: str, ename: str, evalue: str, remote_traceback: list[str]) -> None:
        super().__init__(host, f"{ename}: {evalue}")
        self.ename = ename
        self.evalue = evalue
        self.remote_traceback = remote_traceback

    def _render_traceback_(self) -> list[str]:
        head = f"[{self.host}] raised {self.ename}"
        return [head, *(self.remote_traceback or [f"{self.ename}: {self.evalue}"])]


def remote_error(host: str, ename: str, evalue: str, remote_traceback: list[str]) -> RemoteError:
    """A :class:`RemoteError` whose class carries the remote exception's name."""
    kind = type(ename if ename.isidentifier() else "RemoteError", (RemoteError,), {})
    error: RemoteError = kind(host, ename, evalue, remote_traceback)
    return error
