"""Ready-made starts: guest image and saved guests in a folder that somebody else made.

A container's image has such a folder, or the disk that a classroom's machines mount.
``RDMALAB_SHARED_DIR`` names it; it is read and never written::

    FOLDER/images/ID/       as in the cache, with kernel or kernel.zst
    FOLDER/snapshots/KEY/   state  snapshot.json  and ram or ram.zst

``ram`` is mapped where it lies (by QEMU 8.2 or newer), so that all labs of a machine have one copy
of what they do not change. What is packed is small to send, and is unpacked into the user's own
cache before the first start.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import snapshot
from .errors import BackendError, MachineError
from .manifest import FILES, META, GuestImage
from .packing import pack, packed, unpack
from .paths import shared_dirs
from .qemu import MAPS_READ_ONLY, Qemu
from .snapshot import Snapshot

__all__ = ["find", "write"]

Say = Callable[[str], None]


def find(key: str, qemu: Qemu, say: Say) -> Snapshot | None:
    """The saved start for ``key`` that somebody else made, ready to be restored; None if none is.

    ``say`` hears why one that is there cannot be used. Raises :class:`MachineError` if there is no
    room to unpack it.
    """
    for folder in shared_dirs():
        there = Snapshot(folder / "snapshots" / key)
        if not there.folder.is_dir():
            continue
        try:
            meta = read_meta(there)
            if there.ram.exists() and qemu.version >= MAPS_READ_ONLY:
                return there
            return adopt(there, key, qemu, meta)
        except (OSError, ValueError, KeyError, TypeError, BackendError) as error:
            say(f"the saved start in {there.folder} cannot be used ({error}); making a new one")
    return None


def read_meta(there: Snapshot) -> dict[str, Any]:
    """What snapshot.json says; ValueError if the files are not what it says."""
    meta: dict[str, Any] = json.loads((there.folder / "snapshot.json").read_text())
    for name in snapshot.FILES:
        file = there.folder / name
        if file.exists() and file.stat().st_size != meta[name]["size"]:
            raise ValueError(f"{name} has {file.stat().st_size} bytes")
    return meta


def adopt(there: Snapshot, key: str, qemu: Qemu, meta: dict[str, Any]) -> Snapshot:
    """Copy a saved start into this user's cache, unpacked."""
    with snapshot.make(meta["ram"]["used"] >> 20, sparse=True) as new:
        if there.ram.exists():
            os.truncate(new.ram, meta["ram"]["size"])
            with open(there.ram, "rb") as ram:
                snapshot.keep(ram.fileno(), new.ram)
        else:
            unpack(packed(there.ram), new.ram)
        if new.ram.stat().st_size != meta["ram"]["size"]:
            raise BackendError(f"its memory has {new.ram.stat().st_size} bytes")
        shutil.copyfile(there.state, new.state)
        return snapshot.publish(new, key, qemu.banner)


def prepare(folder: Path) -> None:
    """Make the folder, before the work that it is for. Raises :class:`MachineError`."""
    with writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


@contextlib.contextmanager
def writable(folder: Path) -> Iterator[None]:
    """Turn the errors of a folder that cannot be written into a sentence."""
    try:
        yield
    except OSError as error:
        raise MachineError(
            f"{error.filename or folder} cannot be written ({error.strerror or error}).",
            next_step="Name a folder that you can write, with 1 GB of room.",
        ) from None


def write(folder: Path, image: GuestImage, saved: Snapshot, *, small: bool) -> None:
    """Put image and saved start into ``folder``, for others to start from.

    ``small``: memory and kernel are packed; else they can be used where they lie. What is there
    already stays. Raises :class:`MachineError` if the folder cannot be written.
    """
    with writable(folder):
        with aside(folder / "images" / image.id) as new:
            for name in (META, *FILES):
                if small and name == image.kernel.name:
                    pack(image.kernel, packed(new / name))
                else:
                    shutil.copyfile(image.folder / name, new / name)
        with aside(folder / "snapshots" / saved.folder.name) as new:
            copy_start(saved, Snapshot(new), small=small)


def copy_start(saved: Snapshot, new: Snapshot, *, small: bool) -> None:
    """Memory, state and snapshot.json of a saved start."""
    kept = json.loads((saved.folder / "snapshot.json").read_text())
    size = saved.ram.stat().st_size
    new.ram.touch()
    os.truncate(new.ram, size)
    used = copy_used(saved.ram, new.ram)
    if small:
        pack(new.ram, packed(new.ram))
        new.ram.unlink()
    shutil.copyfile(saved.state, new.state)
    facts = {"made_by": kept["made_by"], "ram": {"size": size, "used": used}}
    facts["state"] = {"size": saved.state.stat().st_size}
    (new.folder / "snapshot.json").write_text(json.dumps(facts))


def copy_used(source: Path, target: Path) -> int:
    """Copy what is not zero, 64 KiB at a time, so that the rest takes no room; its bytes."""
    chunk, used = 1 << 16, 0
    zeros = bytes(chunk)
    with open(source, "rb") as data, open(target, "r+b") as out:
        while block := data.read(chunk):
            if block != zeros[: len(block)]:
                out.seek(data.tell() - len(block))
                out.write(block)
                used += len(block)
    return used


@contextlib.contextmanager
def aside(target: Path) -> Iterator[Path]:
    """A folder that takes the name ``target`` when it is complete; readable by everybody."""
    target.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix=".new-", dir=target.parent))
    try:
        yield new
        new.chmod(0o755)
        for file in new.iterdir():
            file.chmod(0o644)
        if not target.exists():
            new.rename(target)
    finally:
        shutil.rmtree(new, ignore_errors=True)
