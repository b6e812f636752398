"""The hosts' Docker image: the guest image's own root file system, imported once.

So a host has the same programs with every backend, no registry is asked, and a machine without a
network gets it with `rdmalab image import`. It is tagged ``rdmalab-host:ID`` with the guest image's
id, labelled, and shared by all labs of the machine.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .dockerengine import explained
from .errors import MachineError
from .manifest import GuestImage
from .paths import cache_dir

__all__ = ["LABEL", "ensure", "present", "tag"]

NAME = "rdmalab-host"
LABEL = "org.rdmalab.image"
CHUNK_BYTES = 1 << 20
EXTRACT_S = 600


def tag(image: GuestImage) -> str:
    """The Docker image's name for a guest image."""
    return f"{NAME}:{image.id}"


def present(client: Any, image: GuestImage) -> str:
    """The name of the hosts' image if the engine has it, else nothing."""
    import docker.errors

    with explained("for the hosts' image"), contextlib.suppress(docker.errors.ImageNotFound):
        client.images.get(tag(image))
        return tag(image)
    return ""


def ensure(client: Any, image: GuestImage, say: Callable[[str], None]) -> str:
    """The hosts' image, imported now if it is not there; its name."""
    if name := present(client, image):
        return name
    say("making the hosts' Docker image of the guest image (once, about a minute)")
    with unpacked(image) as root, archive(root) as chunks, explained("to import the hosts' image"):
        client.api.import_image_from_stream(
            chunks, repository=NAME, tag=image.id, changes=[f"LABEL {LABEL}={image.id}"]
        )
    remove_others(client, image)
    return tag(image)


@contextlib.contextmanager
def unpacked(image: GuestImage) -> Iterator[Path]:
    """The guest's root file system in a folder, for a while."""
    program = shutil.which("fsck.erofs")
    if program is None:
        raise MachineError(
            "fsck.erofs is not installed, which unpacks the guest image for Docker.",
            next_step="`apt-get install erofs-utils`",
        )
    folder = Path(tempfile.mkdtemp(prefix="docker-", dir=cache_dir()))
    try:
        target = folder / "root"
        done = subprocess.run(
            [program, f"--extract={target}", "--preserve-perms", "--no-preserve-owner", image.root],
            capture_output=True,
            text=True,
            timeout=EXTRACT_S,
            check=False,
        )
        if done.returncode:
            said = done.stderr.strip().splitlines()
            raise MachineError(
                f"The guest image could not be unpacked: {said[-1] if said else done.returncode}.",
                next_step=f"Is {cache_dir()} full? `rdmalab image info` checks the image.",
            )
        yield target
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def archive(root: Path) -> Iterator[Iterator[bytes]]:
    """The folder as a tar archive in which everything belongs to root, in pieces."""
    line = ["tar", "--owner=0", "--group=0", "--numeric-owner", "-C", str(root), "-c", "."]
    with subprocess.Popen(line, stdout=subprocess.PIPE) as tar:
        assert tar.stdout is not None
        out = tar.stdout
        try:
            yield iter(lambda: out.read(CHUNK_BYTES), b"")
        finally:
            tar.kill()


def remove_others(client: Any, image: GuestImage) -> None:
    """Remove images of earlier guest images that no container uses."""
    import docker.errors

    for other in client.images.list(filters={"label": LABEL}):
        if other.labels.get(LABEL) != image.id:
            with contextlib.suppress(docker.errors.APIError):
                client.images.remove(other.id)
