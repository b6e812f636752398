"""Programs on a leash: with root's powers as far as this machine lends them, ended when we end.

Five ways to play root; the first that this machine really allows is taken:

==================  ====================================================================
root                in namespaces of its own: no mount and no process can outlive it
root, as it is      in a container that allows no namespaces; nothing is mounted
user namespace      an ordinary user with ranges in /etc/subuid and /etc/subgid
mmdebstrap's own    where AppArmor lets mmdebstrap make user namespaces, and not us (Ubuntu)
fakechroot          no user namespaces at all; takes the C library of the guest's Debian
==================  ====================================================================
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

__all__ = [
    "FAKECHROOT",
    "MMDEBSTRAP",
    "ROOT",
    "ROOT_AS_IT_IS",
    "USER_NAMESPACE",
    "Way",
    "choose_way",
    "leashed",
    "run",
]

_PROBE_DEADLINE_S = 10.0
_END_DEADLINE_S = 30.0  # a killed program may first have to wait for a busy disk
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_FAKECHROOT_LIBC = "glibc 2.41"  # fakechroot runs this machine's programs with the guest's libc

# Environment that programs see: nothing of the caller's Python, locale or shell decides.
_PROXIES = ("http_proxy", "https_proxy", "no_proxy")
_KEPT_VARIABLES = ("HOME", "SSL_CERT_FILE", *_PROXIES, *(name.upper() for name in _PROXIES))

# Does a way work? Mounting, and giving a file to another user, is what installing packages needs.
_PROBE = "mount -t tmpfs tmpfs /tmp && : > /tmp/probe && chown 1:1 /tmp/probe"


class Way(NamedTuple):
    """How to play root: mmdebstrap's mode, what makes namespaces of ours around a command, and,
    where mmdebstrap makes them, what runs another command in such ones (to try, to clean up).

    Only ``may_mount`` where a mount namespace takes every mount away again: a mount that outlived
    a killed build would have the clean-up delete what is mounted, /dev/shm for example.
    """

    name: str
    mode: str
    prefix: tuple[str, ...] = ()
    helper: tuple[str, ...] = ()
    may_mount: bool = True


_NAMESPACES = ("--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--")
_ROOT = ("unshare", *_NAMESPACES)
_USER = ("unshare", "--user", "--map-root-user", "--map-auto", *_NAMESPACES)

ROOT = Way("root", "root", prefix=_ROOT)
ROOT_AS_IT_IS = Way("root, as it is", "root", may_mount=False)
USER_NAMESPACE = Way("user namespace", "root", prefix=_USER)
MMDEBSTRAP = Way("mmdebstrap's own", "unshare", helper=("mmdebstrap", "--unshare-helper"))
FAKECHROOT = Way("fakechroot", "fakechroot", may_mount=False)


def choose_way() -> Way | None:
    """The first way that works here, found by trying; None if none does."""
    if os.geteuid() == 0:
        return ROOT if _works(ROOT) else ROOT_AS_IT_IS
    for way in (USER_NAMESPACE, MMDEBSTRAP):
        if _works(way):
            return way
    programs = all(shutil.which(name) for name in ("fakechroot", "fakeroot"))
    return (
        FAKECHROOT if programs and os.confstr("CS_GNU_LIBC_VERSION") == _FAKECHROOT_LIBC else None
    )


def _works(way: Way) -> bool:
    command = [*way.helper, "sh", "-c", _PROBE]
    try:
        return run(command, lambda line: None, _PROBE_DEADLINE_S, way=way) == 0
    except (OSError, TimeoutError):
        return False


def leashed(command: Sequence[str], way: Way | None = None) -> list[str]:
    """``command``, made to end when this process does, also by SIGKILL; played by ``way``.

    Without a way it may not have children. A way with namespaces of ours has a process namespace,
    which ends with its first process; all else runs below a supervisor (see below).
    """
    if way is None or way.prefix:
        prefix = way.prefix if way else ()
        return ["setpriv", "--pdeathsig", "KILL", "--", *prefix, *command]
    supervisor = [sys.executable, "-I", "-S", __file__]
    return ["setpriv", "--pdeathsig", "TERM", "--", *supervisor, *command]


def run(
    command: Sequence[str],
    on_line: Callable[[str], None],
    deadline_s: float,
    variables: Mapping[str, str] | None = None,
    way: Way | None = None,
) -> int:
    """Run ``command`` (leashed) to its end, hand on what it prints, and return its exit code.

    Raises TimeoutError after ``deadline_s``, OSError if it cannot be started. Whatever is raised
    in between (Ctrl-C, an error in ``on_line``), it is ended first, with all its children.
    """
    child = subprocess.Popen(
        leashed(command, way),
        env=_environment(variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C is for us; we end the child
    )
    try:
        for line in _lines_of(child, time.monotonic() + deadline_s):
            on_line(line)
    finally:
        code = _end(child, supervised=way is not None and not way.prefix)
    return code


def _environment(more: Mapping[str, str] | None) -> dict[str, str]:
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    return {**kept, "PATH": path, "LC_ALL": "C.UTF-8", **(more or {})}


def _lines_of(child: subprocess.Popen[bytes], deadline: float) -> Iterator[str]:
    """What the child prints, until it has ended (even if somebody else keeps its pipe open)."""
    assert child.stdout is not None
    pending = b""
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        while True:
            ended = _has_ended(child)
            readable = selector.select(timeout=0 if ended else 0.2)
            data = os.read(child.stdout.fileno(), 65536) if readable else b""
            if (ended or readable) and not data:
                break
            *lines, pending = (pending + data).replace(b"\r", b"\n").split(b"\n")
            yield from (line.decode(errors="replace") for line in lines)
            if time.monotonic() > deadline:
                raise TimeoutError
    if pending:
        yield pending.decode(errors="replace")
    while not _has_ended(child):  # it closed its output and goes on
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.05)


def _has_ended(child: subprocess.Popen[bytes]) -> bool:
    """Has it ended? It is left uncollected, so that its number still means its process group."""
    return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end(child: subprocess.Popen[bytes], *, supervised: bool) -> int:
    """End what is left of the child's process group, and collect the child."""
    if supervised and not _has_ended(child):
        child.terminate()
        deadline = time.monotonic() + _END_DEADLINE_S
        while not _has_ended(child) and time.monotonic() < deadline:
            time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    if child.stdout:
        child.stdout.close()
    try:
        return child.wait(timeout=_END_DEADLINE_S)
    except subprocess.TimeoutExpired:
        return -signal.SIGKILL


# ---------------------------------------------------------------- the supervisor, its own process


def _supervise(command: list[str]) -> int:
    """Run ``command``; when it has ended, or SIGTERM comes, end all that came of it.

    As a subreaper this process inherits what its descendants leave behind, daemons in sessions of
    their own included (fakeroot has one), so that "my children, until there are none" is all.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        first = os.posix_spawnp(command[0], command, os.environ)
        while True:
            pid, status = os.wait()
            if pid == first:
                return os.waitstatus_to_exitcode(status)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with contextlib.suppress(ChildProcessError):
            while True:
                for pid in _children():
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)
                os.wait()


def _children() -> Iterator[int]:
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{int(name)}/stat") as stat:
            if int(stat.read().rpartition(")")[2].split()[1]) == os.getpid():
                yield int(name)


if __name__ == "__main__":
    sys.exit(_supervise(sys.argv[1:]))
