"""Saved guests, ready to be restored: the memory in one file, the devices' state in another.

::

    cache_dir()/snapshots/KEY/        ram  state  snapshot.json
    cache_dir()/snapshots/.new-XXXX/  one in the making, with a lock that its maker holds

The key covers everything that a saved guest depends on, so a snapshot that does not fit is never
found, and one that is damaged is noticed before it is used. The memory file is mapped
privately by each lab that is restored from it: a start copies nothing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import BackendError, MachineError
from .paths import cache_dir

__all__ = [
    "Snapshot",
    "clear",
    "find",
    "keep",
    "make",
    "memory",
    "publish",
    "remove",
    "snapshot_key",
    "sweep",
]

FORMAT = 1
KEPT = 4  # the latest used; older ones make room
FILES = ("ram", "state")
SPARE_BYTES = 64 << 20
FULL_BYTES = 16 << 20  # a disk with less to spare is what a failed write was about


@dataclass(frozen=True)
class Snapshot:
    """One saved guest in its folder."""

    folder: Path

    @property
    def ram(self) -> Path:
        """The guest's memory, page for page."""
        return self.folder / "ram"

    @property
    def state(self) -> Path:
        """The devices' state, as QEMU migrates it."""
        return self.folder / "state"


def snapshot_key(*facts: str) -> str:
    """16 hexadecimal digits for everything that the saved guest depends on."""
    return hashlib.sha256(json.dumps([FORMAT, *facts]).encode()).hexdigest()[:16]


def root() -> Path:
    """The folder of all snapshots, made if need be."""
    folder = cache_dir() / "snapshots"
    folder.mkdir(exist_ok=True)
    return folder


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Hold the folder of all snapshots for a moment: nobody sweeps or publishes in between."""
    lock = os.open(root(), os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def find(key: str, made_by: str) -> tuple[Snapshot | None, str]:
    """The snapshot for ``key`` if it is there and whole, else None and, if known, why not.

    ``made_by`` is the QEMU that will load it. A file that was touched since it was saved (its
    size, time or inode differ) is not trusted, and not read either: making it anew is as quick as
    a careful look. A damaged snapshot is removed.
    """
    snapshot = Snapshot(root() / key)
    if not snapshot.folder.is_dir():
        return None, others(made_by)
    try:
        meta = json.loads((snapshot.folder / "snapshot.json").read_text())
        damage = damage_of(snapshot, meta)
        if meta["made_by"] != made_by:
            damage = f"it was saved by {meta['made_by']}, and this is {made_by}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        damage = f"snapshot.json cannot be read ({type(error).__name__})"
    if damage:
        remove(snapshot)
        return None, damage
    os.utime(snapshot.folder)
    return snapshot, ""


def others(made_by: str) -> str:
    """Why nothing is found after an upgrade of QEMU: what is here was saved by another one."""
    makers = set()
    for file in root().glob("[!.]*/snapshot.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            makers.add(str(json.loads(file.read_text())["made_by"]))
    if not makers or made_by in makers:
        return ""
    return f"saved by {min(makers)}, and this is {made_by}"


def damage_of(snapshot: Snapshot, meta: dict[str, Any]) -> str:
    """What is wrong with a snapshot's files; the empty string if nothing is."""
    for name in FILES:
        kept = meta[name]
        seen = stamp(snapshot.folder / name)
        if seen[0] != kept["size"]:
            return f"{name} has {seen[0]} bytes instead of {kept['size']}"
        if seen != kept["stamp"]:
            return f"{name} was changed after it was saved"
    return ""


def stamp(file: Path) -> list[int]:
    """What changes when a file is written or replaced: size, time, inode."""
    info = file.stat()
    return [info.st_size, info.st_mtime_ns, info.st_ino]


@contextlib.contextmanager
def make(ram_mib: int, *, sparse: bool = False) -> Iterator[Snapshot]:
    """A folder for a new snapshot with its memory file, removed again unless it is published.

    The file's blocks are allocated before a guest boots: a full disk is an error here
    (:class:`MachineError`) and not a boot later. What fails later because the disk has
    become full meanwhile is that same error. ``sparse``: only looks whether there is room.
    """
    sweep()
    with held():
        snapshot = Snapshot(Path(tempfile.mkdtemp(prefix=".new-", dir=root())))
        lock = os.open(snapshot.folder, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        reserve(snapshot.ram, ram_mib << 20, sparse=sparse)
        yield snapshot
    except (OSError, BackendError):
        if shutil.disk_usage(root()).free > FULL_BYTES:
            raise
        raise no_room(ram_mib << 20, root()) from None
    finally:
        os.close(lock)
        shutil.rmtree(snapshot.folder, ignore_errors=True)


def reserve(file: Path, size: int, *, sparse: bool) -> None:
    """Allocate ``size`` bytes for ``file``; :class:`MachineError` if there is no room."""
    if shutil.disk_usage(file.parent).free < size + SPARE_BYTES:
        raise no_room(size, file.parent.parent)
    try:
        with open(file, "wb") as out:
            if not sparse:
                os.posix_fallocate(out.fileno(), 0, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise no_room(size, file.parent.parent) from None


@contextlib.contextmanager
def memory(size: int) -> Iterator[int]:
    """A file of ``size`` bytes that is in memory only, for a guest to boot in; its descriptor.

    On a disk every page that a guest touches for the first time would be an entry in a journal.
    """
    fd = os.memfd_create("rdmalab-ram")
    try:
        os.ftruncate(fd, size)
        yield fd
    finally:
        os.close(fd)


def clear(fd: int) -> None:
    """Forget what a guest has written, for another one."""
    size = os.fstat(fd).st_size
    os.ftruncate(fd, 0)
    os.ftruncate(fd, size)


def keep(fd: int, file: Path) -> None:
    """Copy what a guest has written to ``file``, page by page that it has touched."""
    size = os.fstat(fd).st_size
    with open(file, "r+b", buffering=0) as out:
        end = 0
        while end < size:
            try:
                start = os.lseek(fd, end, os.SEEK_DATA)
            except OSError as error:
                if error.errno != errno.ENXIO:  # no more data
                    raise
                return
            end = os.lseek(fd, start, os.SEEK_HOLE)
            out.seek(start)
            os.lseek(fd, start, os.SEEK_SET)
            copied = 0
            while copied < end - start:
                copied += os.sendfile(out.fileno(), fd, None, end - start - copied)


def no_room(size: int, folder: Path) -> MachineError:
    """The error for a disk without room for a guest's memory of ``size`` bytes."""
    free = shutil.disk_usage(folder).free
    return MachineError(
        f"The first start of these hosts needs {(size + SPARE_BYTES) >> 20} MiB in {folder}, and"
        f" {free >> 20} MiB are free.",
        next_step="Make room, or point RDMALAB_CACHE_DIR at a larger disk.",
    )


def publish(new: Snapshot, key: str, made_by: str) -> Snapshot:
    """Put a finished snapshot under its key.

    If another start of the same hosts was quicker, that one's is taken: labs may run from it.
    """
    stamps = {name: stamp(new.folder / name) for name in FILES}
    meta = {name: {"size": seen[0], "stamp": seen} for name, seen in stamps.items()}
    (new.folder / "snapshot.json").write_text(json.dumps({"made_by": made_by, **meta}))
    target = Snapshot(root() / key)
    with held():
        if not target.folder.exists():
            new.folder.rename(target.folder)
        prune(keep=target)
    return target


def remove(snapshot: Snapshot) -> None:
    """Take a snapshot away, unless it is others'. Labs that run from it keep what they mapped."""
    if snapshot.folder.parent == root():
        shutil.rmtree(snapshot.folder, ignore_errors=True)


def prune(keep: Snapshot) -> None:
    """Keep the latest :data:`KEPT` snapshots."""
    folders = [f for f in root().iterdir() if not f.name.startswith(".")]
    folders.sort(key=lambda folder: folder.stat().st_mtime, reverse=True)
    for folder in folders[KEPT:]:
        if folder != keep.folder:
            remove(Snapshot(folder))


def sweep() -> None:
    """Remove what killed makers left: folders whose lock nobody holds."""
    with held():
        for folder in root().glob(".new-*"):
            with contextlib.suppress(OSError):
                lock = os.open(folder, os.O_RDONLY)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
                finally:
                    os.close(lock)
