"""One guest image: its files, what image.json says of them, and whether that is still true."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ImageError
from .recipe import RECIPE_VERSION, recipe_id

__all__ = [
    "FILES",
    "META",
    "REBUILD",
    "GuestImage",
    "complete",
    "meta_from",
    "trust",
    "verify_image",
]

FILES = ("kernel", "initrd", "root.erofs", "packages.list")
META = "image.json"
REBUILD = "Build it again: rdmalab image build"

_STAMP = "verified.json"
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class GuestImage:
    """A complete image: its id, Debian architecture and folder; what is in it, see ``meta``."""

    id: str
    arch: str
    folder: Path

    @property
    def kernel(self) -> Path:
        """The kernel for QEMU's ``-kernel``."""
        return self.folder / "kernel"

    @property
    def initrd(self) -> Path:
        """The initrd; a second cpio archive may be appended (:func:`write_cpio`)."""
        return self.folder / "initrd"

    @property
    def root(self) -> Path:
        """The read-only root file system (erofs), the guest's /dev/vda."""
        return self.folder / "root.erofs"

    @property
    def meta(self) -> dict[str, Any]:
        """What image.json says: id, arch, created, kernel, recipe, files. Raises ImageError."""
        try:
            return meta_from((self.folder / META).read_bytes(), str(self.folder))
        except OSError as error:
            raise _damaged(self, f"image.json cannot be read ({error.strerror})") from None

    @property
    def content(self) -> str:
        """A checksum of all its files: which of two builds of one recipe. Raises ImageError."""
        return hashlib.sha256(json.dumps(self.meta["files"], sort_keys=True).encode()).hexdigest()

    @property
    def size_bytes(self) -> int:
        """All its files together, in bytes. Raises ImageError."""
        return sum(file["size"] for file in self.meta["files"].values())


def verify_image(image: GuestImage, *, full: bool) -> None:
    """Raise ImageError, saying what is damaged, unless the image is what was once made.

    Without ``full`` files that have not changed (size, time, inode) since their checksums were
    last right are not read again: milliseconds instead of most of a second. Nor are files that this
    user could not have changed, as in a container's image, whose engine has checked it.
    """
    files = image.meta["files"]
    if image.meta["id"] != image.id or image.meta["arch"] != image.arch:
        raise _damaged(image, "image.json is of another image")
    seen = {}
    for name in FILES:
        try:
            seen[name] = _look(image.folder / name)
        except OSError as error:
            raise _damaged(image, f"{name} cannot be read ({error.strerror})") from None
        size, wanted = seen[name][0], files[name]["size"]
        if size != wanted:
            raise _damaged(image, f"{name} has {size} bytes instead of {wanted}")
    if not full and (_read_stamp(image) == seen or _sealed(image)):
        return
    for name in FILES:
        try:
            right = _sha256(image.folder / name) == files[name]["sha256"]
        except OSError as error:
            raise _damaged(image, f"{name} cannot be read ({error.strerror})") from None
        if not right:
            raise _damaged(image, f"the checksum of {name} is wrong")
    trust(image)


def trust(image: GuestImage) -> None:
    """Note how the files look now, which are known to be right."""
    with contextlib.suppress(OSError):  # a full disk costs time at the next look, nothing else
        seen = {name: _look(image.folder / name) for name in FILES}
        (image.folder / _STAMP).write_text(json.dumps(seen))


def _look(file: Path) -> list[int]:
    """What changes when a file is written or replaced: size, time, inode."""
    info = file.stat()
    return [info.st_size, info.st_mtime_ns, info.st_ino]


def _sealed(image: GuestImage) -> bool:
    """Whether this user can change nothing of it."""
    paths = (image.folder, *(image.folder / name for name in FILES))
    return not any(os.access(path, os.W_OK) for path in paths)


def _read_stamp(image: GuestImage) -> object:
    try:
        return json.loads((image.folder / _STAMP).read_text())
    except (OSError, ValueError):
        return None


def complete(folder: Path, arch: str, kernel: str) -> GuestImage:
    """Add image.json to the files in ``folder`` and verify the whole."""
    files = {
        name: {"size": (folder / name).stat().st_size, "sha256": _sha256(folder / name)}
        for name in FILES
    }
    meta = {
        "id": recipe_id(arch),
        "arch": arch,
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "kernel": kernel,
        "recipe": RECIPE_VERSION,
        "files": files,
    }
    (folder / META).write_text(json.dumps(meta, indent=1) + "\n")
    image = GuestImage(recipe_id(arch), arch, folder)
    verify_image(image, full=True)
    return image


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with open(file, "rb") as data:
        while chunk := data.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def meta_from(text: bytes, where: str) -> dict[str, Any]:
    """image.json, looked at closely enough that the rest can trust its shape."""
    try:
        meta = json.loads(text)
        for name in FILES:
            if not (meta["files"][name]["size"] >= 0 and len(meta["files"][name]["sha256"]) == 64):
                raise ValueError(name)
        if not all(isinstance(meta[key], str) for key in ("id", "arch", "created", "kernel")):
            raise ValueError("id")
    except (ValueError, KeyError, TypeError):
        raise ImageError(f"image.json of {where} is damaged.", next_step=REBUILD) from None
    return dict(meta)


def _damaged(image: GuestImage, what: str) -> ImageError:
    return ImageError(f"The guest image in {image.folder} is damaged: {what}.", next_step=REBUILD)
