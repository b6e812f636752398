"""Where files live: the cache (survives) and the run-time folder (0700, dies with the login).

Everything that this kit writes outside a checkout is under these two. ``RDMALAB_CACHE_DIR`` and
``RDMALAB_RUNTIME_DIR`` override them; so do the XDG variables that they follow by default. What
somebody else has prepared is only read: ``RDMALAB_SHARED_DIR``.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from .errors import MachineError

__all__ = ["SOCKET_PATH_MAX", "cache_dir", "runtime_dir", "shared_dirs"]

WRITABLE = "Set RDMALAB_CACHE_DIR and RDMALAB_RUNTIME_DIR to folders that you can write."
SOCKET_PATH_MAX = 107  # bytes of a Unix socket's path without the final NUL: sun_path in unix(7)


def cache_dir() -> Path:
    """The folder for images and snapshots, made if need be.

    ``RDMALAB_CACHE_DIR``, else ``$XDG_CACHE_HOME/rdmalab``, else ``~/.cache/rdmalab``; where that
    cannot be written (HOME of another user, read-only), a folder below the temporary one.
    """
    override = os.environ.get("RDMALAB_CACHE_DIR")
    if override:
        return _private_dir(Path(override))
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(_home(), ".cache")
    try:
        return _private_dir(Path(base) / "rdmalab")
    except MachineError:
        return _private_dir(Path(tempfile.gettempdir()) / f"rdmalab-cache-{os.getuid()}")


def runtime_dir() -> Path:
    """The 0700 folder for sockets, keys and state, made if need be.

    ``RDMALAB_RUNTIME_DIR``, else ``$XDG_RUNTIME_DIR/rdmalab``, else ``/tmp/rdmalab-UID``.
    """
    override = os.environ.get("RDMALAB_RUNTIME_DIR")
    if override:
        return _private_dir(Path(override))
    xdg = os.environ.get("XDG_RUNTIME_DIR")
    if xdg and os.access(xdg, os.W_OK) and len(xdg) < SOCKET_PATH_MAX - 50:
        return _private_dir(Path(xdg) / "rdmalab")
    return _private_dir(Path("/tmp") / f"rdmalab-{os.getuid()}")


def shared_dirs() -> list[Path]:
    """Folders with guest images and saved starts that somebody else made; see ``shared``.

    ``RDMALAB_SHARED_DIR`` names them, with ``:`` between several. They need not exist.
    """
    names = os.environ.get("RDMALAB_SHARED_DIR", "").split(os.pathsep)
    return [Path(name).absolute() for name in names if name]


def _home() -> str:
    """HOME, also for a uid that has no passwd entry (``expanduser`` then answers ``~``)."""
    home = os.path.expanduser("~")
    return home if os.path.isabs(home) else "/nonexistent"


def _private_dir(path: Path) -> Path:
    """Make ``path`` with mode 0700, or refuse one that belongs to somebody else."""
    path = path.absolute()  # QEMU, and the next command, start in other folders
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = path.lstat()
    except OSError as error:
        raise MachineError(
            f"The folder {path} cannot be made ({error.strerror}).",
            next_step=WRITABLE,
        ) from None
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
        raise MachineError(
            f"{path} belongs to another user or is no folder, so nothing secret may go there.",
            next_step="Set RDMALAB_CACHE_DIR and RDMALAB_RUNTIME_DIR to folders of your own.",
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise MachineError(
            f"The folder {path} cannot be written.",
            next_step=WRITABLE,
        )
    if stat.S_IMODE(info.st_mode) & 0o077:
        path.chmod(0o700)
    return path
