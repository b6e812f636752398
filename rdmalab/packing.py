"""Files packed with zstd: a saved guest's memory to an eighth of its size, a kernel to a third."""

from __future__ import annotations

import subprocess
from pathlib import Path

from .errors import BackendError, MachineError

__all__ = ["pack", "packed", "unpack"]

LEVEL = 12
DEADLINE_S = 300.0  # on a slow disk


def packed(file: Path) -> Path:
    """The name of a file when it is packed."""
    return file.with_name(f"{file.name}.zst")


def pack(source: Path, target: Path) -> None:
    """Pack a file, with a checksum; errors as :func:`unpack`."""
    zstd(f"-{LEVEL}", "-T0", str(source), "-o", str(target))


def unpack(source: Path, target: Path) -> None:
    """Unpack a file; zeros become holes. :class:`BackendError` if it is damaged or there is no
    room, :class:`MachineError` where there is no zstd."""
    zstd("-d", "--sparse", str(source), "-o", str(target))


def zstd(*words: str) -> None:
    """Run zstd to its end, or until its deadline."""
    command = ["zstd", "--force", "--quiet", *words]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=DEADLINE_S
        )
    except FileNotFoundError:
        raise MachineError(
            "The program zstd is not installed, which packs and unpacks what is shared.",
            next_step="Run: rdmalab doctor --fix",
        ) from None
    except subprocess.TimeoutExpired:
        raise BackendError(f"zstd was not done within {DEADLINE_S:.0f} s") from None
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines() or ["no reason given"]
        raise BackendError(f"zstd ended with {done.returncode}: {said[-1][:160]}")
