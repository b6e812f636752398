"""The shelf where guest images lie: one at a time is made, aside, and put there when complete.

::

    cache_dir()/images/ID/            complete images
    cache_dir()/images/.build-XXXX/   one in the making; whoever holds the lock owns all of these
    cache_dir()/images/.lock          held while an image is made or imported
    cache_dir()/logs/                 logs of builds that failed
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import IO

from .builder import ELSEWHERE_PREFIX
from .errors import ImageError
from .leash import MMDEBSTRAP, USER_NAMESPACE, run
from .paths import cache_dir

__all__ = [
    "images_dir",
    "interruptible",
    "keep_log",
    "locked",
    "publish",
    "require_space",
    "workshop",
]

_LOCK_DEADLINE_S = 3600.0  # a build on a slow network
_LOCK_POLL_S = 0.2
_REMOVE_DEADLINE_S = 10.0
_LOGS_KEPT = 10
_IMAGES_KEPT = 3  # the newest; an image of an older recipe is 150 MB that nobody asks for any more
_WORKSHOP_PREFIX = ".build-"


def images_dir() -> Path:
    """The folder of all images, made if need be. Raises ImageError if it cannot be."""
    folder = cache_dir() / "images"
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from None
    return folder


def _unwritable(path: Path, error: OSError) -> ImageError:
    return ImageError(
        f"{path} cannot be written ({error.strerror}).",
        next_step="Make room, or point RDMALAB_CACHE_DIR at a folder that you can write.",
    )


@contextlib.contextmanager
def locked(waiting: Callable[[str], None]) -> Iterator[bool]:
    """Hold the lock of the shelf; yields whether somebody else had it.

    ``waiting`` hears once a second or so for how long. Raises ImageError after an hour. The lock
    is the kernel's, so that no crash leaves it behind.
    """
    with _open_lock() as lock:
        start = time.monotonic()
        told_s = -1
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waited_s = int(time.monotonic() - start)
            if waited_s > told_s:
                waiting(f"another rdmalab is making an image; waiting for it ({waited_s} s)")
                told_s = waited_s
            if waited_s > _LOCK_DEADLINE_S:
                raise ImageError(
                    f"Another rdmalab has been making an image for {waited_s // 60} minutes.",
                    next_step="Look for it with: fuser -v " + str(images_dir() / ".lock"),
                )
            time.sleep(_LOCK_POLL_S)
        yield told_s >= 0


def _open_lock() -> IO[str]:
    path = images_dir() / ".lock"
    try:
        return open(path, "w")
    except OSError as error:
        raise _unwritable(path, error) from None


@contextlib.contextmanager
def workshop() -> Iterator[Path]:
    """A folder to make an image in, removed in the end, however it comes.

    Only for the holder of the lock: what earlier builds left behind, killed in the middle, goes.
    """
    for stale in images_dir().glob(_WORKSHOP_PREFIX + "*"):
        _remove_workshop(stale)
    folder = Path(tempfile.mkdtemp(prefix=_WORKSHOP_PREFIX, dir=images_dir()))
    try:
        yield folder
    finally:
        with _undisturbed():
            _remove_workshop(folder)


def _remove_workshop(folder: Path) -> None:
    """Remove a workshop, and where its builder worked elsewhere (see ``builder``)."""
    elsewhere = folder / "elsewhere"
    if elsewhere.is_symlink():
        scratch = Path(os.readlink(elsewhere))
        if scratch.name.startswith(ELSEWHERE_PREFIX) and scratch.is_dir():
            _remove_tree(scratch)
    _remove_tree(folder)


def _remove_tree(folder: Path) -> None:
    """Remove a folder, also files in it that belong to ids of a user namespace of ours.

    Tries for 10 s, as ended programs may still be on their way out. Raises OSError if it stays.
    Nothing is removed while something is mounted below: that may be the machine's own /dev/shm.
    """
    deadline = time.monotonic() + _REMOVE_DEADLINE_S
    while folder.exists():
        _unmount_below(folder)
        shutil.rmtree(folder, ignore_errors=True)
        for way in (USER_NAMESPACE, MMDEBSTRAP) if os.geteuid() != 0 and folder.exists() else ():
            inner = [str(path) for path in folder.iterdir()]
            with contextlib.suppress(OSError, TimeoutError):
                run([*way.helper, "rm", "-rf", *inner], _ignore, _REMOVE_DEADLINE_S, way=way)
        shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():
            if time.monotonic() > deadline:
                raise OSError(f"cannot remove {folder}")
            time.sleep(0.1)


def _unmount_below(folder: Path) -> None:
    """Take away mounts, the innermost first; raise OSError if one stays.

    Builds mount nothing outside of namespaces of their own, so there should be none. It would cost
    too much to be wrong about that.
    """
    for mount in reversed(_mounts_below(folder)):
        run(["umount", "--lazy", str(mount)], _ignore, _REMOVE_DEADLINE_S)
    if mounts := _mounts_below(folder):
        raise OSError(f"{mounts[0]} is mounted, so {folder} cannot be removed: unmount it")


def _mounts_below(folder: Path) -> list[Path]:
    """Mount points below a folder, in the order of mounting."""
    lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    fields = [line.split(b" ")[4] for line in lines]  # proc(5); blanks are written as \040
    names = [re.sub(rb"\\(\d{3})", lambda m: bytes([int(m[1], 8)]), field) for field in fields]
    return [path for name in names if folder.resolve() in (path := Path(os.fsdecode(name))).parents]


def _ignore(line: str) -> None:
    pass


def publish(result: Path, image_id: str, aside: Path) -> Path:
    """Put the complete image ``result`` on the shelf; an older one of that id goes ``aside``.

    Images of older recipes make room. A lab that runs from one has its files open and runs on.
    """
    target = images_dir() / image_id
    if target.exists():
        target.rename(aside)
    result.rename(target)
    images = [folder for folder in images_dir().glob("[!.]*") if folder != target]
    images.sort(key=lambda folder: folder.stat().st_mtime, reverse=True)
    for old in images[_IMAGES_KEPT - 1 :]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def require_space(needed_bytes: int, what_for: str) -> None:
    """Raise ImageError unless the cache folder's disk has ``needed_bytes`` to spare."""
    free = shutil.disk_usage(images_dir()).free
    if free < needed_bytes:
        raise ImageError(
            f"{what_for} needs {needed_bytes / 1e9:.1f} GB in {images_dir()}, and"
            f" {free / 1e9:.1f} GB are free.",
            next_step="Make room, or point RDMALAB_CACHE_DIR at a larger disk.",
        )


def keep_log(text: str) -> str:
    """Write a failed build's log; returns a sentence with its place. The last ten are kept."""
    folder = cache_dir() / "logs"
    name = f"image-build-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    try:
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        return f"Its log could not be kept ({error.strerror})."
    for old in sorted(folder.glob("image-build-*.log"))[:-_LOGS_KEPT]:
        old.unlink(missing_ok=True)
    return f"Its log is {folder / name}."


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end what runs as Ctrl-C does: KeyboardInterrupt, and clean-up."""
    with _handling({signal.SIGTERM: _interrupt, signal.SIGHUP: _interrupt}):
        yield


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Nobody's second Ctrl-C stops the clean-up, which takes a second or two."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    with _handling(dict.fromkeys(signals, signal.SIG_IGN)):
        yield


_Handler = Callable[[int, FrameType | None], object] | signal.Handlers


@contextlib.contextmanager
def _handling(handlers: dict[signal.Signals, _Handler]) -> Iterator[None]:
    """Only the main thread can have handlers; elsewhere the caller looks after signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = [number for number in handlers if signal.getsignal(number) != signal.SIG_IGN]  # nohup
    before = {number: signal.signal(number, handlers[number]) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
