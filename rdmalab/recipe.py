"""What the guest image is made of, as pure data and pure functions; ``builder`` runs them.

The recipe is the folder ``guest/`` (package list, module list, hooks, init) and the constants
below. :func:`recipe_id` is a hash of all that and of nothing else, so that an image is built again
when its content would change, and only then.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from .errors import ImageError

__all__ = [
    "ARCHES",
    "GUEST",
    "Mirror",
    "debian_arch",
    "erofs_command",
    "extract_command",
    "hook_environment",
    "initrd_modules",
    "likely_cause",
    "mirror_in",
    "mmdebstrap_command",
    "names_in",
    "recipe_id",
]

GUEST = Path(__file__).with_name("guest")
GUEST_FILES = (
    "exclude.txt",
    "hook-customize.sh",
    "hook-setup.sh",
    "initrd-init",
    "modules.txt",
    "packages.txt",
)

ARCHES = {"amd64": "x86_64", "arm64": "aarch64"}  # Debian's name to the kernel's (uname -m)

# Raise after a change of code, outside guest/ and the constants below, that changes the content.
RECIPE_VERSION = 1

SUITE = "trixie"
KERNEL_SUITE = "trixie-backports"  # the first Debian kernel with rxe in network namespaces

INITRD_MODULES = ("virtio_blk", "erofs", "overlay")  # what it takes to reach the root file system
INITRD_FOLDERS = ("dev", "lower", "newroot", "proc", "rw", "sys")

# lz4hc is the best that the erofs tools of Debian 12 know. The same root takes 161 MB with lz4,
# 147 MB with lz4hc, 127 MB with clusters of 64 KiB; boot and imports take equally long. Fixed time
# and UUID: equal input gives an equal image.
EROFS_OPTIONS = (
    "-zlz4hc,9",
    "-C65536",
    "-T0",
    "-x-1",
    "-U72646d61-6c61-4b62-8000-000000000001",
    "--all-root",
)

# Left out of the root: device nodes (an ordinary user cannot make them), what names the mirror.
TAR_EXCLUDE = ("./dev/*", "./etc/apt", "./var/lib/apt", "./var/cache/*", "./var/log/*")

# What a finished root must hold (patterns); looked for before it is packed, so that a list that has
# lost a line fails the build and not a lab.
REQUIRED = (
    "usr/bin/ib_send_lat",
    "usr/bin/rdma",
    "usr/bin/tcpdump",
    "usr/lib/python3/dist-packages/ipykernel/__pycache__/kernelapp.*.pyc",
    "usr/lib/python3.*/asyncio/__pycache__/__init__.*.pyc",
    "usr/lib/python3/dist-packages/pyverbs/__init__.py",
    "usr/share/doc/rdma-core/tests/base.py",
)

# Debian's releases by the names under which a machine's own apt sources may have them.
_DEBIAN_SUITES = frozenset(
    ("bookworm", "trixie", "forky", "sid", "oldstable", "stable", "testing", "unstable")
)


class Mirror(NamedTuple):
    """Addresses of Debian's archive; empty for mmdebstrap's own default."""

    main: str = ""
    security: str = ""


def debian_arch(arch: str | None = None) -> str:
    """``arch`` in Debian's words, by default this machine's: ``amd64`` or ``arm64``.

    Raises ImageError for a machine (or a name) that there is no kernel with rxe for.
    """
    wanted = arch or platform.machine().lower()
    for name, machine in ARCHES.items():
        if wanted in (name, machine) or (wanted == "arm64" and name == "arm64"):
            return name
    raise ImageError(
        f"There is no guest image for the architecture {wanted!r}.",
        next_step=f"Known are: {', '.join(ARCHES)}.",
    )


def recipe_id(arch: str | None = None) -> str:
    """16 hexadecimal digits that change when, and only when, the image's content should."""
    return _recipe_id(debian_arch(arch), GUEST)


@functools.cache
def _recipe_id(arch: str, guest: Path) -> str:
    constants = (RECIPE_VERSION, SUITE, KERNEL_SUITE, INITRD_MODULES, INITRD_FOLDERS)
    content = json.dumps([arch, *constants, EROFS_OPTIONS, TAR_EXCLUDE])
    digest = hashlib.sha256(content.encode())
    for name in GUEST_FILES:
        data = (guest / name).read_bytes()
        digest.update(f"\n{name} {len(data)}\n".encode() + data)
    return digest.hexdigest()[:16]


def names_in(text: str) -> list[str]:
    """The names in a list file: one a line, ``#`` starts a comment."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return [line for line in lines if line]


def mmdebstrap_command(
    target: Path, guest: Path, arch: str, mode: str, *, may_mount: bool
) -> list[str]:
    """Makes the guest's root as the tar file ``target``, with the hooks in the folder ``guest``.

    ``mode`` is mmdebstrap's (root, unshare, fakechroot); it should run with the variables of
    :func:`hook_environment`.

    /sys is never mounted in the new root (a user namespace may not, and nothing there needs it),
    /proc and /dev only if it ``may_mount``.
    apt fetches as root: its own user could not enter the cache folder, which is 0700.
    """
    command = ["mmdebstrap", f"--mode={mode}", "--variant=essential", "--format=tar", "--verbose"]
    command += [f"--architectures={arch}"]
    command += ["--skip=chroot/mount/sys" if may_mount else "--skip=chroot/mount"]
    command += ["--include=" + ",".join(names_in((guest / "packages.txt").read_text()))]
    for option in (
        'Apt::Install-Recommends "false"',
        'Apt::Sandbox::User "root"',
        'Acquire::Retries "3"',
        'Acquire::http::Timeout "30"',
        'Acquire::https::Timeout "30"',
    ):
        command.append(f"--aptopt={option}")
    for pattern in names_in((guest / "exclude.txt").read_text()):
        kind = "include" if pattern.startswith("!") else "exclude"
        command.append(f"--dpkgopt=path-{kind}={pattern.removeprefix('!')}")
    for hook in ("setup", "customize"):
        script = shlex.quote(str(guest / f"hook-{hook}.sh"))
        command.append(f'--{hook}-hook=sh {script} "$1"')
    return [*command, SUITE, str(target)]


def hook_environment(guest: Path, arch: str, mirror: Mirror) -> dict[str, str]:
    """What the two hooks read from their environment."""
    return {
        "RDMALAB_GUEST": str(guest),
        "RDMALAB_ARCH": arch,
        "RDMALAB_SUITE": SUITE,
        "RDMALAB_KERNEL_SUITE": KERNEL_SUITE,
        "RDMALAB_MIRROR": mirror.main,
        "RDMALAB_SECURITY_MIRROR": mirror.security,
    }


def extract_command(archive: Path, folder: Path) -> list[str]:
    """Unpacks mmdebstrap's tar file as any user: modes are kept, owners are not."""
    excludes = [f"--exclude={pattern}" for pattern in TAR_EXCLUDE]
    return ["tar", "-x", "-p", "--no-same-owner", *excludes, "-f", str(archive), "-C", str(folder)]


def erofs_command(target: Path, folder: Path) -> list[str]:
    """Packs the folder as a read-only file system in which everything belongs to root."""
    return ["mkfs.erofs", "--quiet", *EROFS_OPTIONS, str(target), str(folder)]


def initrd_modules(modules_dep: str, wanted: Iterable[str]) -> list[str]:
    """Paths of the modules ``wanted`` and of what they need, in the order in which to load them.

    ``modules_dep`` is the text of depmod's file of that name: a line for each module, with all
    that it needs, the last one first. Raises ImageError for a name that is not there.
    """
    needs = {}
    for line in modules_dep.splitlines():
        path, _, rest = line.partition(":")
        needs[path] = [*reversed(rest.split()), path]
    by_name = {_module_name(path): path for path in needs}
    order: dict[str, None] = {}
    for name in wanted:
        if name.replace("-", "_") not in by_name:
            raise ImageError(
                f"The guest's kernel has no module {name}, which the initrd needs.",
                next_step="Is it built in now? Then take it out of INITRD_MODULES in recipe.py.",
            )
        order.update(dict.fromkeys(needs[by_name[name.replace("-", "_")]]))
    return list(order)


def _module_name(path: str) -> str:
    return path.rpartition("/")[2].partition(".ko")[0].replace("-", "_")


def mirror_in(texts: Sequence[str]) -> Mirror:
    """The Debian mirror that a machine's own apt sources name, from the texts of these files.

    Understands the one-line and the deb822 format. Only http and https are taken, as only these
    work in every mode of building. Empty where there is none, as on Ubuntu.
    """
    main = security = ""
    for uri, suite in _sources(texts):
        if suite in _DEBIAN_SUITES and not main:
            main = uri
        if suite.removesuffix("-security") in _DEBIAN_SUITES and suite.endswith("-security"):
            security = security or uri
    return Mirror(main, security if main else "")


def _sources(texts: Iterable[str]) -> Iterable[tuple[str, str]]:
    """Pairs of address and suite of all binary package sources with the component main."""
    for text in texts:
        uncommented = re.sub(r"(?m)^[ \t]*#.*\n?", "", text)
        for line in re.finditer(
            r"(?m)^deb\s+(?:\[[^\]]*\]\s+)?(https?://\S+)\s+(\S+)\s+(.*)$", uncommented
        ):
            if "main" in line[3].split():
                yield line[1], line[2]
        for stanza in re.split(r"\n\s*\n", uncommented):
            fields = {
                key.lower(): value.split()
                for key, value in re.findall(r"(?m)^([\w-]+):((?:.*\n?)(?:[ \t].*\n?)*)", stanza)
            }
            usable = "deb" in fields.get("types", []) and "main" in fields.get("components", [])
            if usable and fields.get("enabled", ["yes"])[0].lower() not in ("no", "false"):
                for uri in fields.get("uris", []):
                    if uri.startswith(("http://", "https://")):
                        yield from ((uri, suite) for suite in fields.get("suites", []))


# What the end of a log tells, most telling first: pattern, cause, next step.
_CAUSES: tuple[tuple[str, str, str], ...] = (
    (
        r"No space left on device|Disk quota exceeded|not have enough free space",
        "the disk is full",
        "Make room for about 2 GB, or point RDMALAB_CACHE_DIR at a larger disk.",
    ),
    (
        r"NO_PUBKEY|is not signed|couldn't be verified|signatures? (?:were|was) invalid",
        "this machine does not know the key of Debian trixie",
        "Upgrade the package debian-archive-keyring and try again.",
    ),
    (
        r"Could not resolve|Temporary failure|Unable to connect|Could not connect|"
        r"Connection (?:timed out|refused|failed)|Network is unreachable|Failed to fetch|"
        r"Could not wait for server",
        "Debian's archive could not be reached",
        "Check the network (and http_proxy), or set RDMALAB_MIRROR to a mirror that you can"
        " reach; without any network, import an image that was exported elsewhere.",
    ),
    (
        r"Unable to locate package|has no installation candidate|Version .* was not found|"
        r"pulls in no kernel|does not have a Release file",
        "the mirror lacks a package or a suite that the image needs",
        "Set RDMALAB_MIRROR to a complete mirror of Debian.",
    ),
    (
        r"unshare failed|write.*uid_map|newuidmap|Operation not permitted|cannot unshare",
        "this machine does not allow what building needs (user namespaces)",
        "Build as root, or install uidmap, fakechroot and fakeroot: rdmalab doctor --fix.",
    ),
    (
        r"command not found|cannot find|No such file or directory",
        "a program is missing",
        "Run: rdmalab doctor --fix",
    ),
)


def likely_cause(log: str) -> tuple[str, str]:
    """The most likely cause that a build log tells, and the next step; both plain sentences."""
    for line in re.findall(r"(?m)^E: rdmalab: (.*)$", log):
        return line, "See the list files in rdmalab/guest/."
    for pattern, cause, next_step in _CAUSES:
        if re.search(pattern, log):
            return cause, next_step
    return "the log does not tell why", "Read its last lines, and run it again."
