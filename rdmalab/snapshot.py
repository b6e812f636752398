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
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .errors import MachineError
from .paths import cache_dir

__all__ = ["Snapshot", "find", "make", "publish", "remove", "snapshot_key"]

FORMAT = 1
KEPT = 4  # the latest used; older ones make room
FILES = ("ram", "state")
SPARE_BYTES = 64 << 20


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


def find(key: str) -> tuple[Snapshot | None, str]:
    """The snapshot for ``key`` if it is there and whole, else None and, if damaged, in what way.

    A file that was touched since it was saved (its size, time or inode differ) is not trusted, and
    not read either: making it anew is as quick as a careful look. A damaged snapshot is removed.
    """
    snapshot = Snapshot(root() / key)
    if not snapshot.folder.is_dir():
        return None, ""
    try:
        meta = json.loads((snapshot.folder / "snapshot.json").read_text())
        damage = damage_of(snapshot, meta)
    except (OSError, ValueError, KeyError, TypeError) as error:
        damage = f"snapshot.json cannot be read ({type(error).__name__})"
    if damage:
        remove(snapshot)
        return None, damage
    os.utime(snapshot.folder)
    return snapshot, ""


def damage_of(snapshot: Snapshot, meta: dict[str, dict[str, object]]) -> str:
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
def make(ram_mib: int) -> Iterator[Snapshot]:
    """A folder for a new snapshot with its memory file, removed again unless it is published.

    The file's blocks are allocated before a guest runs on it: a full disk is an error here
    (:class:`MachineError`) and not a crash of QEMU later.
    """
    sweep()
    snapshot = Snapshot(Path(tempfile.mkdtemp(prefix=".new-", dir=root())))
    lock = os.open(snapshot.folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        reserve(snapshot.ram, ram_mib << 20)
        yield snapshot
    finally:
        os.close(lock)
        if snapshot.folder.name.startswith(".new-"):
            shutil.rmtree(snapshot.folder, ignore_errors=True)


def reserve(file: Path, size: int) -> None:
    """Allocate ``size`` bytes for ``file``; :class:`MachineError` if there is no room."""
    needed = size + SPARE_BYTES
    free = shutil.disk_usage(file.parent).free
    try:
        if free < needed:
            raise OSError("too little room")
        with open(file, "wb") as out:
            os.posix_fallocate(out.fileno(), 0, size)
    except OSError:
        raise MachineError(
            f"The first start of these hosts needs {needed >> 20} MiB in {file.parent.parent}, and"
            f" {free >> 20} MiB are free.",
            next_step="Make room, or point RDMALAB_CACHE_DIR at a larger disk.",
        ) from None


def publish(new: Snapshot, key: str) -> Snapshot:
    """Put a finished snapshot under its key."""
    stamps = {name: stamp(new.folder / name) for name in FILES}
    meta = {name: {"size": seen[0], "stamp": seen} for name, seen in stamps.items()}
    (new.folder / "snapshot.json").write_text(json.dumps(meta))
    target = Snapshot(root() / key)
    if target.folder.exists():
        remove(target)
    new.folder.rename(target.folder)
    prune(keep=target)
    return target


def remove(snapshot: Snapshot) -> None:
    """Take a snapshot away. Labs that run from it keep the memory that they have mapped."""
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
    for folder in root().glob(".new-*"):
        with contextlib.suppress(OSError):
            lock = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
