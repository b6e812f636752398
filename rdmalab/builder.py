"""Runs the recipe of the guest image: the only place that starts programs for it.

Four ways, the first that this machine really allows is taken:

==================  =====================================================================
root                in namespaces of its own: no mount and no process can outlive it
root, as it is      in a container that may not mount; mmdebstrap copes
user namespace      an ordinary user with entries in /etc/subuid and /etc/subgid
fakechroot          an ordinary user of a machine without user namespaces
==================  =====================================================================

Every program is on a leash: it is ended when this process ends, however that happens.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from . import recipe
from .cpio import write_cpio

__all__ = ["BuildFailed", "Progress", "Step", "Way", "build_files", "choose_way", "remove_tree"]

STEPS = ("packages", "kernel", "root file system", "initrd", "check")

_BUILD_DEADLINE_S = 3600.0  # most of it for a slow network, or for building under emulation
_PACK_DEADLINE_S = 900.0
_PROBE_DEADLINE_S = 20.0
_END_DEADLINE_S = 10.0

# Environment that a build may see: nothing of the caller's Python, locale or shell decides.
_PROXIES = ("http_proxy", "https_proxy", "no_proxy")
_KEPT_VARIABLES = ("HOME", "SSL_CERT_FILE", *_PROXIES, *(name.upper() for name in _PROXIES))

# Lines of mmdebstrap and of our hook, the step that they begin or belong to, and how much of the
# whole build is typically done by then.
_MILESTONES: tuple[tuple[str, str, float], ...] = (
    ("I: running apt-get update", "packages", 0.02),
    ("I: downloading packages", "packages", 0.05),
    ("I: extracting archives", "packages", 0.08),
    ("I: installing essential", "packages", 0.25),
    ("I: installing remaining", "packages", 0.33),
    ("I: rdmalab: fetching the kernel", "kernel", 0.55),
    ("I: rdmalab: unpacking the kernel", "kernel", 0.60),
    ("I: rdmalab: choosing modules", "kernel", 0.66),
    ("I: rdmalab: compiling", "root file system", 0.76),
    ("I: creating tarball", "root file system", 0.86),
)


@dataclass(frozen=True)
class Step:
    """Where a build is: step ``number`` of ``total``, and ``done_fraction`` (0 to 1) of it all."""

    number: int
    total: int
    name: str
    detail: str
    done_fraction: float


class Way(NamedTuple):
    """How to become (or play) root: mmdebstrap's mode, and what its command line starts with."""

    name: str
    mode: str
    prefix: tuple[str, ...]


_NAMESPACES = ("--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--")
_AS_ROOT_OF_NAMESPACE = ("unshare", "--user", "--map-root-user", "--map-auto")
ROOT = Way("root", "root", ("unshare", *_NAMESPACES))
ROOT_AS_IT_IS = Way("root, as it is", "root", ())
USER_NAMESPACE = Way("user namespace", "root", (*_AS_ROOT_OF_NAMESPACE, *_NAMESPACES))
FAKECHROOT = Way("fakechroot", "fakechroot", ())

# Does a way work? Mounting, and giving a file to another user, is what installing packages needs.
_PROBE = "mount -t tmpfs tmpfs /tmp && : > /tmp/probe && chown 1:1 /tmp/probe"

# Ends its whole process group when the process that started it has gone; for the ways without a
# process namespace, in which ending the first process ends all.
_LEASH = 'trap "trap \\"\\" TERM; kill -KILL 0" TERM; "$@" & wait $!'


class BuildFailed(Exception):
    """A step failed; ``step`` and ``log`` say which and what was printed until then."""

    def __init__(self, step: str, what: str, log: str) -> None:
        super().__init__(what)
        self.step = step
        self.log = log


class Progress:
    """Turns what happens into :class:`Step` reports, and remembers the log."""

    def __init__(self, on_step: Callable[[Step], None] | None) -> None:
        self._on_step = on_step
        self._packages = 0
        self.step = STEPS[0]
        self.share = 0.0
        self.lines: list[str] = []

    def report(self, step: str, detail: str, share: float) -> None:
        """The build is in ``step``, doing ``detail``; ``share`` (0 to 1) of all is done."""
        self.step, self.share = step, max(share, self.share)
        if self._on_step:
            number = STEPS.index(step) + 1
            self._on_step(Step(number, len(STEPS), step, detail, self.share))

    def line(self, line: str) -> None:
        """A line that a program printed."""
        self.lines.append(line)
        for part, step, share in _MILESTONES:
            if line.startswith(part):
                self.report(step, line.removeprefix("I: ").removeprefix("rdmalab: "), share)
                return
        if line.startswith(("Unpacking ", "Setting up ")):
            self._packages += 1  # some 250 packages, each of them twice
            self.report(
                self.step, line.partition(" (")[0], min(0.08 + 0.001 * self._packages, 0.54)
            )


def choose_way() -> Way:
    """The first way that works here, found by trying. Raises BuildFailed if none does."""
    for way in (ROOT, ROOT_AS_IT_IS) if os.geteuid() == 0 else (USER_NAMESPACE, FAKECHROOT):
        if way == ROOT_AS_IT_IS or (way.prefix and _works(way)):
            return way
        if way == FAKECHROOT and all(shutil.which(name) for name in ("fakechroot", "fakeroot")):
            return way
    raise BuildFailed(
        STEPS[0],
        "as an ordinary user it takes user namespaces with entries in /etc/subuid and /etc/subgid"
        " (package uidmap), or fakechroot and fakeroot",
        "unshare failed",
    )


def _works(way: Way) -> bool:
    try:
        done = subprocess.run(
            [*way.prefix, "sh", "-c", _PROBE],
            env=_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PROBE_DEADLINE_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def build_files(folder: Path, arch: str, mirror: recipe.Mirror, progress: Progress) -> str:
    """Make vmlinuz, initrd, root.erofs and packages.list in ``folder``/result.

    Returns the version of the guest's kernel. Raises BuildFailed, OSError (disk full), ImageError.
    """
    way = choose_way()
    for name in ("tmp", "root", "result"):
        (folder / name).mkdir()
    (folder / "root").chmod(0o755)
    progress.report("packages", f"as {way.name}", 0.0)
    archive = folder / "root.tar"
    variables = recipe.hook_environment(arch, mirror) | {"TMPDIR": str(folder / "tmp")}
    command = recipe.mmdebstrap_command(archive, arch, way.mode)
    _run(_leashed(command, way), progress, _BUILD_DEADLINE_S, variables)

    progress.report("root file system", "unpacking", 0.90)
    root, result = folder / "root", folder / "result"
    _run(_leashed(recipe.extract_command(archive, root)), progress, _PACK_DEADLINE_S)
    archive.unlink()
    _require(root, progress)
    boot = folder / "boot"
    (root / "boot").rename(boot)
    (root / "boot").mkdir()

    progress.report("root file system", "packing", 0.91)
    _run(_leashed(recipe.erofs_command(result / "root.erofs", root)), progress, _PACK_DEADLINE_S)

    kernel = (boot / "kernel-version").read_text().strip()
    progress.report("initrd", f"kernel {kernel}", 0.97)
    (result / "initrd").write_bytes(_initrd(root, boot / "busybox", kernel))
    for name in ("vmlinuz", "packages.list"):
        (boot / name).rename(result / name)
    return kernel


def _require(root: Path, progress: Progress) -> None:
    missing = [name for name in recipe.REQUIRED if not (root / name).exists()]
    if missing:
        what = f"the root file system lacks {', '.join(missing)}"
        raise BuildFailed(progress.step, what, f"E: rdmalab: {what}")


def _initrd(root: Path, busybox: Path, kernel: str) -> bytes:
    """The first archive of the initrd: busybox, the init, and the modules that it loads."""
    modules = root / "usr/lib/modules" / kernel
    paths = recipe.initrd_modules((modules / "modules.dep").read_text(), recipe.INITRD_MODULES)
    order = [path.rpartition("/")[2] for path in paths]
    files: dict[str, bytes | Path] = {
        f"modules/{name}": modules / path for name, path in zip(order, paths, strict=True)
    }
    files["modules/order"] = "".join(f"{name}\n" for name in order).encode()
    files["bin/busybox"] = busybox
    files["init"] = recipe.GUEST / "initrd-init"
    return write_cpio(files, executable=("init", "bin/busybox"), folders=recipe.INITRD_FOLDERS)


def _environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    return {**kept, "PATH": path, "LC_ALL": "C.UTF-8", **(more or {})}


def _leashed(command: Sequence[str], way: Way | None = None) -> list[str]:
    """``command``, made to end when this process does; without a way it has no children."""
    if way is None or way.prefix:
        return ["setpriv", "--pdeathsig", "KILL", "--", *(way.prefix if way else ()), *command]
    return ["setpriv", "--pdeathsig", "TERM", "--", "sh", "-c", _LEASH, "sh", *command]


def _run(
    command: Sequence[str],
    progress: Progress,
    deadline_s: float,
    variables: Mapping[str, str] | None = None,
) -> None:
    """Run to the end, line by line into ``progress``; raise BuildFailed unless it succeeds."""
    progress.lines.append("$ " + " ".join(command))
    child = subprocess.Popen(
        command,
        env=_environment(variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C is for us; we end the child
    )
    try:
        for line in _lines_of(child, time.monotonic() + deadline_s):
            progress.line(line)
        code = child.wait(timeout=_END_DEADLINE_S)
    except (subprocess.TimeoutExpired, TimeoutError):
        raise BuildFailed(
            progress.step, f"not done within {deadline_s:.0f} s", "\n".join(progress.lines)
        ) from None
    finally:
        _end(child)
    if code != 0:
        what = f"{Path(command[0]).name} ended with exit code {code}"
        raise BuildFailed(progress.step, what, "\n".join(progress.lines))


def _lines_of(child: subprocess.Popen[bytes], deadline: float) -> Iterator[str]:
    """What the child prints, until it has ended (even if somebody else keeps its pipe open)."""
    assert child.stdout is not None
    pending = b""
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        while True:
            ended = child.poll() is not None
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


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the child's process group and collect it; nothing happens if it has ended already."""
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait(timeout=_END_DEADLINE_S)
    if child.stdout:
        child.stdout.close()


def remove_tree(folder: Path) -> None:
    """Remove a build folder, also files in it that belong to ids of our user namespace.

    Tries for 10 s, as ended programs may still be on their way out. Raises OSError if it stays.
    """
    deadline = time.monotonic() + _END_DEADLINE_S
    while folder.exists():
        shutil.rmtree(folder, ignore_errors=True)
        if folder.exists() and os.geteuid() != 0:
            command = [*_AS_ROOT_OF_NAMESPACE, "rm", "-rf", "--one-file-system", str(folder)]
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(command, capture_output=True, timeout=_END_DEADLINE_S)
        if folder.exists():
            if time.monotonic() > deadline:
                raise OSError(f"cannot remove {folder}")
            time.sleep(0.1)
