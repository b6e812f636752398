"""The guest image: kernel, initrd and root file system that every virtual lab starts from.

::

    cache_dir()/images/ID/   kernel  initrd  root.erofs  packages.list  image.json  verified.json
                             ID = recipe_id(): what the image should contain, not when it was made
    shared_dirs()/images/ID/ the same, made by somebody else and only read

>>> image = find_image() or build_image()                               # doctest: +SKIP
>>> image.kernel, image.initrd, image.root                              # doctest: +SKIP

Packages come from mmdebstrap's default mirror, or the machine's own if it is a Debian with one.
``RDMALAB_MIRROR`` names another, a classroom's for example, and ``RDMALAB_SECURITY_MIRROR`` one for
security updates, which are left out if only the first is set.

An image is complete or absent: it is made aside and renamed into place. Before use its files are
compared with what was seen when their checksums were last right, and else checked in full.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

from .builder import BuildFailed, Progress, Step, build_files
from .cpio import write_cpio
from .doctor.packages import NEEDS, present
from .errors import ImageError
from .manifest import (
    FILES,
    META,
    REBUILD,
    GuestImage,
    complete,
    meta_from,
    trust,
    verify_image,
)
from .packing import packed, unpack
from .paths import shared_dirs
from .recipe import ARCHES, Mirror, debian_arch, likely_cause, mirror_in, recipe_id
from .shelf import images_dir, interruptible, keep_log, locked, publish, require_space, workshop

__all__ = [
    "GuestImage",
    "Step",
    "build_image",
    "build_requirements",
    "export_image",
    "find_image",
    "import_image",
    "recipe_id",
    "verify_image",
    "write_cpio",
]

_COPY_AGAIN = "Is it complete? Copy it again, or export it again where it came from."
_META_BYTES_MAX = 1_000_000
_BUILD_BYTES = 1_000_000_000  # measured: 686 MB at most


def build_requirements() -> dict[str, str]:
    """What building takes: program (or absolute path of a file) to Debian package."""
    return {need.probe: need.apt for need in NEEDS if need.kind == "build"}


def find_image(arch: str | None = None) -> GuestImage | None:
    """The image of today's recipe, verified, or None if it is yet to be built.

    Raises ImageError if it is there but damaged: it must not boot.
    """
    name = debian_arch(arch)
    for shelf in (images_dir(), *(folder / "images" for folder in shared_dirs())):
        image = GuestImage(recipe_id(name), name, shelf / recipe_id(name))
        if image.folder.is_dir():
            image = _unpacked(image) if packed(image.kernel).exists() else image
            verify_image(image, full=False)
            return image
    return None


def _unpacked(image: GuestImage) -> GuestImage:
    """A shared image with a packed kernel: that one in the cache, the rest where it lies."""
    mark = hashlib.sha256((image.folder / META).read_bytes()).hexdigest()[:8]
    target = images_dir() / f"{image.id}-{mark}"
    with interruptible(), locked(lambda text: None), workshop() as folder:
        if not target.is_dir():
            result = folder / "result"
            result.mkdir()
            for name in (META, *FILES):
                (result / name).symlink_to(image.folder / name)
            (result / image.kernel.name).unlink()
            unpack(packed(image.kernel), result / image.kernel.name)
            trust(GuestImage(image.id, image.arch, result))
            publish(result, target.name, folder / "old")
    return GuestImage(image.id, image.arch, target)


def build_image(
    *,
    arch: str | None = None,
    force: bool = False,
    on_step: Callable[[Step], None] | None = None,
) -> GuestImage:
    """The image of today's recipe: the one that is there, or (or with ``force``) a new one.

    Takes about a minute and most of a GB while it lasts. Of two builds at the same time the
    second waits and takes the result of the first. Ctrl-C, SIGTERM and errors leave nothing
    behind. Raises ImageError with the step, the likely cause and the place of the log;
    KeyboardInterrupt after Ctrl-C or SIGTERM (handled here only in the main thread).
    """
    name = debian_arch(arch)
    progress = Progress(on_step)
    image = None if force else _usable(name, progress)
    if image:
        return image
    with interruptible(), locked(lambda text: progress.report("packages", text, 0.0)) as waited:
        image = _usable(name, progress) if waited or not force else None
        return image or _build(name, progress)


def _usable(arch: str, progress: Progress) -> GuestImage | None:
    try:
        return find_image(arch)
    except ImageError as error:
        progress.report("packages", f"{error.what} It is built again.", 0.0)
        return None


def _build(arch: str, progress: Progress) -> GuestImage:
    _require_tools(arch)
    require_space(_BUILD_BYTES, "Building the guest image")
    try:
        with workshop() as folder:
            kernel = build_files(folder, arch, _mirror(), progress)
            progress.report("check", "checksums", 0.98)
            image = complete(folder / "result", arch, kernel)
            image = GuestImage(image.id, arch, publish(image.folder, image.id, folder / "old"))
    except BuildFailed as error:
        cause, next_step = likely_cause(error.log)
        where = keep_log(error.log)
        raise ImageError(
            f"The guest image could not be built: step {error.step!r} failed, {error}."
            f" The likely cause: {cause}. {where}",
            next_step=next_step,
        ) from None
    except OSError as error:
        raise ImageError(
            f"The guest image could not be built: step {progress.step!r} failed,"
            f" {error.strerror or error}. {keep_log(chr(10).join(progress.lines))}",
            next_step=likely_cause(str(error))[1],
        ) from None
    progress.report("check", "done", 1.0)
    return image


def _require_tools(arch: str) -> None:
    optional = ("newuidmap", "fakeroot", "fakechroot", "busybox", "cpio")  # choose_way looks
    needs = {need: deb for need, deb in build_requirements().items() if need not in optional}
    missing = {deb for need, deb in needs.items() if not present(need)}
    if missing:
        raise ImageError(
            f"Building the guest image needs: {', '.join(sorted(missing))}.",
            next_step="Install them: rdmalab doctor --fix",
        )
    emulator = Path("/proc/sys/fs/binfmt_misc") / f"qemu-{ARCHES[arch]}"
    if arch != debian_arch() and not (emulator.exists() and present("arch-test")):
        raise ImageError(
            f"This machine cannot run programs for {arch}, which building for it takes.",
            next_step="Install qemu-user-static, binfmt-support and arch-test, or build there and"
            " use rdmalab image export and import.",
        )


def _mirror() -> Mirror:
    """RDMALAB_MIRROR, else the machine's own mirror of Debian, else mmdebstrap's default."""
    chosen = os.environ.get("RDMALAB_MIRROR")
    if chosen:
        return Mirror(chosen, os.environ.get("RDMALAB_SECURITY_MIRROR", ""))
    folder = Path("/etc/apt")
    names = [folder / "sources.list", *sorted(folder.glob("sources.list.d/*"))]
    texts = []
    for name in names:
        with contextlib.suppress(OSError):
            texts.append(name.read_text(encoding="utf-8", errors="replace"))
    return mirror_in(texts)


def export_image(file: Path, *, arch: str | None = None) -> GuestImage:
    """Write the image into one tar file for a machine without network; returns it.

    Raises ImageError if there is none, it is damaged, or the file cannot be written.
    """
    image = find_image(arch)
    if image is None:
        raise ImageError("There is no guest image to export yet.", next_step=REBUILD)
    verify_image(image, full=True)
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        with tarfile.open(part, "w", dereference=True) as tar:
            for name in (META, *FILES):
                tar.add(image.folder / name, arcname=name, filter=_anonymous)
        part.replace(file)
    except OSError as error:
        raise ImageError(
            f"{file} cannot be written ({error.strerror or error}).",
            next_step=f"It takes {image.size_bytes / 1e6:.0f} MB in a folder that you can write.",
        ) from None
    finally:
        part.unlink(missing_ok=True)
    return image


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    member.mode = 0o644
    return member


def import_image(file: Path) -> GuestImage:
    """Take over an image from a file that :func:`export_image` wrote on another machine.

    Nothing is unpacked by name: the expected files, and only these, are copied and compared with
    their checksums. Raises ImageError for anything else, for another architecture or recipe.
    """
    with interruptible(), locked(lambda text: None):
        try:
            with tarfile.open(file, "r:") as tar, workshop() as folder:
                return _import(tar, folder, file)
        except (tarfile.TarError, EOFError, OSError) as error:
            full = getattr(error, "errno", None) == errno.ENOSPC
            raise ImageError(
                f"{file} cannot be imported ({getattr(error, 'strerror', None) or error}).",
                next_step=likely_cause(str(error))[1] if full else _COPY_AGAIN,
            ) from None


def _import(tar: tarfile.TarFile, folder: Path, file: Path) -> GuestImage:
    meta_bytes = _member(tar, META, file).read(_META_BYTES_MAX)
    meta = meta_from(meta_bytes, str(file))
    arch = debian_arch()
    if meta["arch"] != arch:
        raise ImageError(
            f"{file} is an image for {meta['arch']}, and this machine is {arch}.",
            next_step=f"Export one on a machine that is {arch}.",
        )
    if meta["id"] != recipe_id(arch):
        raise ImageError(
            f"{file} was built from another recipe ({meta['id']}, here it is {recipe_id(arch)}).",
            next_step="Use the same version of rdmalab on both machines.",
        )
    require_space(sum(entry["size"] for entry in meta["files"].values()), "Importing the image")
    result = folder / "result"
    result.mkdir()
    (result / META).write_bytes(meta_bytes)
    for name in FILES:
        with open(result / name, "wb") as out:
            shutil.copyfileobj(_member(tar, name, file, meta["files"][name]["size"]), out)
    image = GuestImage(meta["id"], arch, result)
    try:
        verify_image(image, full=True)
    except ImageError as error:
        raise ImageError(f"{file} is damaged: {error.what}", next_step=_COPY_AGAIN) from None
    return GuestImage(meta["id"], arch, publish(result, meta["id"], folder / "old"))


def _member(
    tar: tarfile.TarFile, name: str, file: Path, size_bytes: int | None = None
) -> IO[bytes]:
    """The regular file of the archive with exactly this name (and size)."""
    found = [member for member in tar.getmembers() if member.name == name]
    data = tar.extractfile(found[0]) if len(found) == 1 and found[0].isreg() else None
    if data is None:
        raise ImageError(
            f"{file} is no exported guest image (it has no {name}).",
            next_step="Make one with: rdmalab image export FILE",
        )
    if size_bytes not in (None, found[0].size):
        raise ImageError(
            f"{file} is damaged: {name} has {found[0].size} bytes instead of {size_bytes}.",
            next_step=_COPY_AGAIN,
        )
    return data
