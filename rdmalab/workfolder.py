"""A learner's own folder of labs: filled from the labs as they were handed out, never overwritten.

::

    FOLDER/00_meet_your_hosts.ipynb       the learner's
    FOLDER/00_meet_your_hosts.new.ipynb   beside it, where a later version differs from the one
                                          that the learner has changed
    FOLDER/.rdmalab-labs.json             checksums of what was laid there

A file that the learner has not touched follows the version of the labs; one that was deleted is
laid again, which is how to begin anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from .errors import MachineError

__all__ = ["fill"]

RECORD = ".rdmalab-labs.json"
HANDED_OUT = ("*.ipynb", "images/*", "data/*")  # not the solutions, and not what builds the labs


def fill(folder: Path, labs: Path) -> list[str]:
    """Lay the labs into ``folder``; returns sentences about what was kept or is new.

    Raises :class:`MachineError` if the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return list(lay(folder, labs))
    except OSError as error:
        raise MachineError(
            f"The labs cannot be laid into {folder}: {error.strerror} ({error.filename}).",
            next_step="Give it room and the right to be written, or name another folder.",
        ) from None


def lay(folder: Path, labs: Path) -> Iterator[str]:
    """File by file; the record is written in the end."""
    laid = recorded(folder)
    fresh = 0
    for file in handed_out(labs):
        name = str(file.relative_to(labs))
        mine, new = folder / name, checksum(file)
        seen = checksum(mine) if mine.exists() else None
        if seen is None or (seen == laid.get(name) and seen != new):
            put(file, mine)
            fresh += 1
        elif seen != new and laid.get(name) not in (None, new):
            beside = mine.with_suffix(f".new{mine.suffix}")
            put(file, beside)
            yield f"{name} is as you left it; there is a newer version of it in {beside.name}"
        laid[name] = new
    record(folder, laid)
    if fresh:
        yield f"{fresh} files of the labs are laid into {folder}"


def handed_out(labs: Path) -> list[Path]:
    """The files that a learner gets, in order."""
    return sorted(file for pattern in HANDED_OUT for file in labs.glob(pattern) if file.is_file())


def recorded(folder: Path) -> dict[str, str]:
    """Checksums of what was laid here; empty where the record cannot be read: all is then kept."""
    try:
        found = json.loads((folder / RECORD).read_text())
        return {str(name): str(value) for name, value in found.items()}
    except (OSError, ValueError, AttributeError):
        return {}


def record(folder: Path, laid: dict[str, str]) -> None:
    """Write the record, all at once."""
    part = folder / f"{RECORD}.part"
    part.write_text(json.dumps(laid, indent=1) + "\n")
    part.replace(folder / RECORD)


def put(source: Path, target: Path) -> None:
    """Copy a file, all at once."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        shutil.copyfile(source, part)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def checksum(file: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal digits."""
    return hashlib.sha256(file.read_bytes()).hexdigest()
