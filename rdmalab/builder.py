"""Runs the recipe of the guest image, step by step, and tells how far it is."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import recipe
from .cpio import write_cpio
from .leash import Way, choose_way, run

__all__ = ["ELSEWHERE_PREFIX", "BuildFailed", "Progress", "Step", "build_files"]

ELSEWHERE_PREFIX = "rdmalab-build-"  # see _scratch
STEPS = ("packages", "kernel", "root file system", "initrd", "check")

_BUILD_DEADLINE_S = 3600.0  # most of it for a slow network, or for building under emulation
_PACK_DEADLINE_S = 900.0

# Lines of mmdebstrap and of our hook, the step that they begin or belong to, and how much of the
# whole build is typically done by then.
_MILESTONES: tuple[tuple[str, str, float], ...] = (
    ("I: running apt-get update", "packages", 0.02),
    ("I: downloading packages", "packages", 0.05),
    ("I: extracting archives", "packages", 0.08),
    ("I: installing essential", "packages", 0.25),
    ("I: installing remaining", "packages", 0.33),
    ("I: rdmalab: fetching the kernel", "kernel", 0.55),
    ("I: rdmalab: unpacking the kernel", "kernel", 0.60),
    ("I: rdmalab: choosing modules", "kernel", 0.66),
    ("I: rdmalab: compiling", "root file system", 0.76),
    ("I: creating tarball", "root file system", 0.86),
)


@dataclass(frozen=True)
class Step:
    """Where a build is: step ``number`` of ``total``, and ``done_fraction`` (0 to 1) of it all."""

    number: int
    total: int
    name: str
    detail: str
    done_fraction: float


class BuildFailed(Exception):
    """A step failed; ``step`` and ``log`` say which and what was printed until then."""

    def __init__(self, step: str, what: str, log: str) -> None:
        super().__init__(what)
        self.step = step
        self.log = log


class Progress:
    """Turns what happens into :class:`Step` reports, and remembers the log."""

    def __init__(self, on_step: Callable[[Step], None] | None) -> None:
        self._on_step = on_step
        self._packages = 0
        self.step = STEPS[0]
        self.share = 0.0
        self.lines: list[str] = []

    @property
    def log(self) -> str:
        """Everything that the programs printed so far."""
        return "\n".join(self.lines)

    def report(self, step: str, detail: str, share: float) -> None:
        """The build is in ``step``, doing ``detail``; ``share`` (0 to 1) of all is done."""
        self.step, self.share = step, max(share, self.share)
        if self._on_step:
            number = STEPS.index(step) + 1
            self._on_step(Step(number, len(STEPS), step, detail, self.share))

    def line(self, line: str) -> None:
        """A line that a program printed."""
        self.lines.append(line)
        for part, step, share in _MILESTONES:
            if line.startswith(part):
                self.report(step, line.removeprefix("I: ").removeprefix("rdmalab: "), share)
                return
        if line.startswith(("Unpacking ", "Setting up ")):
            self._packages += 1  # some 250 packages, each of them twice
            self.report(
                self.step, line.partition(" (")[0], min(0.08 + 0.001 * self._packages, 0.54)
            )


def build_files(
    folder: Path,
    arch: str,
    mirror: recipe.Mirror,
    progress: Progress,
    guest: Path = recipe.GUEST,
) -> str:
    """Make kernel, initrd, root.erofs and packages.list in ``folder``/result.

    ``guest`` is the recipe's folder. Returns the version of the guest's kernel. Raises BuildFailed,
    OSError (disk full), ImageError.
    """
    way = _way(progress)
    for name in ("root", "result"):
        (folder / name).mkdir()
        (folder / name).chmod(0o755)  # root's mode becomes that of the guest's /
    archive, root, result = folder / "root.tar", folder / "root", folder / "result"
    _make_archive(archive, _scratch(folder, way, guest), way, arch, mirror, progress)

    progress.report("root file system", "unpacking", 0.90)
    _run(recipe.extract_command(archive, root), progress, _PACK_DEADLINE_S)
    archive.unlink()
    _require(root, progress)
    boot = folder / "boot"
    (root / "boot").rename(boot)
    (root / "boot").mkdir()

    progress.report("root file system", "packing", 0.91)
    _run(recipe.erofs_command(result / "root.erofs", root), progress, _PACK_DEADLINE_S)

    kernel = (boot / "kernel-version").read_text().strip()
    progress.report("initrd", f"kernel {kernel}", 0.97)
    (result / "initrd").write_bytes(_initrd(root, boot / "busybox", kernel, guest))
    for name in ("kernel", "packages.list"):
        (boot / name).rename(result / name)
    return kernel


def _way(progress: Progress) -> Way:
    way = choose_way()
    if way is None:
        what = (
            "as an ordinary user it takes user namespaces with ranges in /etc/subuid and"
            " /etc/subgid (package uidmap), or fakechroot on a Debian as new as the guest's"
        )
        raise BuildFailed(progress.step, what, "unshare failed")
    progress.report("packages", f"as {way.name}", 0.0)
    return way


def _scratch(folder: Path, way: Way, guest: Path) -> Path:
    """Where mmdebstrap may work, with a copy of the recipe's files in it.

    Its own user namespace has no access to folders of ours that are 0700, as the cache is; then it
    works in the machine's folder for temporary files, and ``folder``/elsewhere points there.
    """
    scratch = folder / "tmp"
    if way.mode == "unshare":
        scratch = Path(tempfile.mkdtemp(prefix=ELSEWHERE_PREFIX))
        (folder / "elsewhere").symlink_to(scratch)
    scratch.mkdir(exist_ok=True)
    scratch.chmod(0o755)
    shutil.copytree(guest, scratch / "guest")
    for path in (scratch / "guest", *(scratch / "guest").iterdir()):
        path.chmod(0o755)
    return scratch


def _make_archive(
    archive: Path,
    scratch: Path,
    way: Way,
    arch: str,
    mirror: recipe.Mirror,
    progress: Progress,
) -> None:
    """Let mmdebstrap and the hooks make the whole root, as a tar file."""
    guest = scratch / "guest"
    variables = recipe.hook_environment(guest, arch, mirror) | {"TMPDIR": str(scratch)}
    command = recipe.mmdebstrap_command(archive, guest, arch, way.mode, may_mount=way.may_mount)
    _run(command, progress, _BUILD_DEADLINE_S, variables, way)


def _require(root: Path, progress: Progress) -> None:
    missing = [pattern for pattern in recipe.REQUIRED if not any(root.glob(pattern))]
    if missing:
        what = f"the root file system lacks {', '.join(missing)}"
        raise BuildFailed(progress.step, what, f"E: rdmalab: {what}")


def _initrd(root: Path, busybox: Path, kernel: str, guest: Path) -> bytes:
    """The first archive of the initrd: busybox, the init, and the modules that it loads."""
    modules = root / "usr/lib/modules" / kernel
    paths = recipe.initrd_modules((modules / "modules.dep").read_text(), recipe.INITRD_MODULES)
    order = [path.rpartition("/")[2] for path in paths]
    files: dict[str, bytes | Path] = {
        f"modules/{name}": modules / path for name, path in zip(order, paths, strict=True)
    }
    files["modules/order"] = "".join(f"{name}\n" for name in order).encode()
    files["bin/busybox"] = busybox
    files["init"] = guest / "initrd-init"
    return write_cpio(files, executable=("init", "bin/busybox"), folders=recipe.INITRD_FOLDERS)


def _run(
    command: Sequence[str],
    progress: Progress,
    deadline_s: float,
    variables: Mapping[str, str] | None = None,
    way: Way | None = None,
) -> None:
    """Run to the end, line by line into ``progress``; raise BuildFailed unless it succeeds."""
    progress.lines.append("$ " + " ".join(command))
    try:
        code = run(command, progress.line, deadline_s, variables, way)
    except TimeoutError:
        what = f"{command[0]} was not done within {deadline_s:.0f} s"
        raise BuildFailed(progress.step, what, progress.log) from None
    if code != 0:
        what = f"{command[0]} ended with exit code {code}"
        raise BuildFailed(progress.step, what, progress.log)
