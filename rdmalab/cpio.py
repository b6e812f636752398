"""The archive format of an initrd: cpio, "newc" variant.

Linux unpacks several such archives one after the other, which is how the host-side Python files
reach the guest without a new image: a second archive is appended to the initrd at each start.
Format: Documentation/driver-api/early-userspace/buffer-format.rst of the Linux source.
"""

from __future__ import annotations

import stat
from collections.abc import Collection, Mapping
from pathlib import Path, PurePosixPath

__all__ = ["write_cpio"]

_BLOCK_BYTES = 512  # padding at the end, as cpio(1) does; keeps a following archive aligned
_TRAILER = "TRAILER!!!"


def write_cpio(
    files: Mapping[str, bytes | Path],
    *,
    executable: Collection[str] = (),
    folders: Collection[str] = (),
) -> bytes:
    """One archive with ``files`` (name in the archive to content, or to a file with it).

    Parent folders are made, as are the (empty) ``folders``. Everything belongs to root, has time
    stamp 0 and comes in the order of names, so equal input gives equal bytes. Files have mode
    0644, those named in ``executable`` 0755. Raises ValueError for a name with ``..`` in it or
    without any part, OSError for a file that cannot be read.
    """
    contents = {_clean(name): value for name, value in files.items()}
    programs = {_clean(name) for name in executable}
    entries: dict[str, bytes | Path | None] = dict.fromkeys(_clean(name) for name in folders)
    for name in [*contents, *entries]:
        parents = [str(parent) for parent in PurePosixPath(name).parents]
        entries.update(dict.fromkeys(parent for parent in parents if parent != "."))
    entries.update(contents)
    out = bytearray()
    for number, name in enumerate(sorted(entries), start=1):
        value = entries[name]
        data = value.read_bytes() if isinstance(value, Path) else value
        if data is None:
            out += _entry(number, name, stat.S_IFDIR | 0o755, b"")
        else:
            mode = stat.S_IFREG | (0o755 if name in programs else 0o644)
            out += _entry(number, name, mode, data)
    out += _entry(0, _TRAILER, 0, b"")
    return bytes(out) + bytes(-len(out) % _BLOCK_BYTES)


def _clean(name: str) -> str:
    path = PurePosixPath(name.lstrip("/"))
    if ".." in path.parts or not path.parts:
        raise ValueError(f"{name!r} is no name for a file in an archive")
    return str(path)


def _entry(number: int, name: str, mode: int, data: bytes) -> bytes:
    """Header of 13 fields of 8 hexadecimal digits, name, data; each part padded to 4 bytes."""
    encoded = name.encode() + b"\0"
    links = 2 if stat.S_ISDIR(mode) else 1
    #         inode   mode  uid gid links time size   dev   rdev  name size     checksum
    fields = (number, mode, 0, 0, links, 0, len(data), 0, 0, 0, 0, len(encoded), 0)
    head = b"070701" + b"".join(b"%08X" % field for field in fields) + encoded
    return head + bytes(-len(head) % 4) + data + bytes(-len(data) % 4)
