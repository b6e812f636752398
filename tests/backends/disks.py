"""The test machine's disks: made once, kept in the cache under a hash of what is in them.

::

    cache_dir()/test-machines/KEY/
        kernel  initrd  root.erofs  packages.list    as of the guest image, with a Docker engine
        site.erofs                                   the Python packages of pyproject.toml

The root is the guest image's with more in it: each file of ``guest/`` that the guest image's recipe
has too is appended to it (a list of packages gets longer). Everything else is the recipe's own.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from rdmalab import image, recipe
from rdmalab.builder import BuildFailed, Progress, build_files
from rdmalab.doctor.machine import run
from rdmalab.errors import ImageError
from rdmalab.paths import cache_dir
from rdmalab.shelf import interruptible, keep_log, locked, require_space, workshop

__all__ = ["ADDED", "ROOT", "find_or_make", "requirements"]

ROOT = Path(__file__).parents[2]
ADDED = Path(__file__).with_name("guest")
NEEDED_BYTES = 3_000_000_000
KEPT = 2
PIP_DEADLINE_S = 600.0
GUEST_PYTHON = "3.13"  # trixie's
# Which wheels that Python takes on trixie's C library (glibc 2.41), newest first.
WHEELS = ("manylinux_2_28", "manylinux2014", "manylinux_2_17")
# The tests of the backends run notebooks, and open no JupyterLab.
LEFT_OUT = ("jupyterlab",)
FOR_TESTS = ("pytest", "pytest-timeout")

Say = Callable[[str], None]


def requirements() -> list[str]:
    """What pyproject.toml asks of pip for the package, and the little of it for tests."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    wanted = re.findall(r'(?m)^    "(([\w.-]+)[<>=][^"]*)",', text)
    package, _, extras = text.partition("[project.optional-dependencies]")
    return [
        whole
        for whole, name in wanted
        if (f'"{whole}"' in package and name not in LEFT_OUT)
        or (f'"{whole}"' in extras and name in FOR_TESTS)
    ]


def key() -> str:
    """A hash of all that is in the disks."""
    parts = [recipe.recipe_id(), GUEST_PYTHON, *WHEELS, *requirements()]
    parts += [(ADDED / name).read_text() for name in additions()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def additions() -> list[str]:
    """The files of ``guest/`` that are appended to the recipe's files of the same name."""
    return sorted(file.name for file in ADDED.iterdir() if file.name in recipe.GUEST_FILES)


def find_or_make(say: Say) -> Path:
    """The folder with the disks; made now, in a minute or two, if it is not there.

    Raises ImageError with the step that failed, the likely cause and the place of the log.
    """
    folder = cache_dir() / "test-machines" / key()
    if folder.is_dir():
        return folder
    with interruptible(), locked(say):
        return folder if folder.is_dir() else make(folder, say)


def make(folder: Path, say: Say) -> Path:
    """Make the disks aside and put them at ``folder``; older ones make room."""
    require_space(NEEDED_BYTES, "Building the test machine")
    progress = Progress(None)
    try:
        with workshop() as work:
            say("building the test machine's root (once, about a minute)")
            build_files(work, recipe.debian_arch(), image._mirror(), progress, added(work))
            say("building its Python packages (once, half a minute)")
            pack_site(work, work / "result" / "site.erofs")
            folder.parent.mkdir(exist_ok=True)
            (work / "result").rename(folder)
    except BuildFailed as error:
        cause, next_step = recipe.likely_cause(error.log)
        raise ImageError(
            f"The test machine could not be built: the step {error.step!r} failed ({error})."
            f" The likely cause: {cause}. {keep_log(error.log)}",
            next_step=next_step,
        ) from None
    old = sorted(folder.parent.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    for stale in old[KEPT:]:
        shutil.rmtree(stale, ignore_errors=True)
    return folder


def added(work: Path) -> Path:
    """The guest image's recipe with our additions, in a folder below ``work``."""
    guest = work / "recipe"
    shutil.copytree(recipe.GUEST, guest)
    for name in additions():
        with open(guest / name, "a") as file:
            file.write((ADDED / name).read_text())
    return guest


def pack_site(work: Path, disk: Path) -> None:
    """Fetch the Python packages for the guest's Python, by this machine's pip, into a disk."""
    machine = recipe.ARCHES[recipe.debian_arch()]
    line = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--no-input"]
    line += [
        "--disable-pip-version-check",
        "--root-user-action=ignore",
        "--target",
        str(work / "site"),
    ]
    line += ["--implementation=cp", f"--python-version={GUEST_PYTHON}", "--only-binary=:all:"]
    line += [f"--platform={kind}_{machine}" for kind in WHEELS]
    pack = recipe.erofs_command(disk, work / "site")
    for command in ([*line, *requirements()], [word for word in pack if "lz4hc" not in word]):
        code, said = run(command, PIP_DEADLINE_S)
        if code:
            raise BuildFailed("Python packages", f"{command[0]} ended with exit code {code}", said)
