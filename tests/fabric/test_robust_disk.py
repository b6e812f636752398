"""B64: the disk of the cache is full: from the start, while a guest boots, while a lab runs.

The disk is a small one in memory, mounted in a mount namespace of the test's own: it is gone with
the last process in there, whatever becomes of the test.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rdmalab import image, paths

from .sandbox import Sandbox, sandbox

pytestmark = [pytest.mark.fabric, pytest.mark.long, pytest.mark.timeout(600)]

HOSTS = ("alice",)
NEEDED_MIB = 544  # 320 of the guest, 160 of its host, 64 to spare
DISK_MIB = NEEDED_MIB + 16
SILENCE_S = 20.0  # promised are 15, on a machine that has nothing else to do
MOUNT = 'mount -t tmpfs -o mode=700,size="$1"m tmpfs "$2" && echo mounted && exec sleep 3600'


@contextlib.contextmanager
def small_disk(place: Path) -> Iterator[tuple[list[str], Path]]:
    """A disk of DISK_MIB at ``place``: what to put before a command, and the way in from here."""
    enter, user = ["nsenter", "--mount"], []
    if os.geteuid() != 0:
        enter, user = ["nsenter", "--user", "--preserve-credentials", "--mount"], ["-r"]
    line = ["unshare", *user, "--mount", "sh", "-c", MOUNT, "sh", str(DISK_MIB), str(place)]
    with subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"mounted\n", "no mount namespace can be made here"
            yield [*enter, f"--target={holder.pid}", "--"], Path(f"/proc/{holder.pid}/root{place}")
        finally:
            holder.kill()


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Sandbox]:
    """A sandbox with its cache on the small disk; the image stays where it is."""
    found = image.find_image()
    assert found is not None, "there is no guest image: rdmalab image build"
    own, place = paths.cache_dir(), tmp_path / "cache"
    place.mkdir(mode=0o700)
    with small_disk(place) as (prefix, inside):
        (inside / "images").symlink_to(own / "images")
        if (own / "kvm").exists():
            shutil.copytree(own / "kvm", inside / "kvm")
        with sandbox(inside) as made:
            made.prefix = prefix
            made.env["RDMALAB_CACHE_DIR"] = str(place)
            yield made


def fill(disk: Path, mib: int | None = None) -> None:
    """Take so much of the disk, or all of it."""
    with open(disk / "images.fill", "ab") as file, contextlib.suppress(OSError):
        while mib is None or file.tell() < mib << 20:
            file.write(bytes(1 << 16))
            file.flush()
    free = shutil.disk_usage(disk).free
    assert free == 0 if mib is None else free < NEEDED_MIB << 20


def make_room(disk: Path) -> None:
    (disk / "images.fill").unlink()


def refused(box: Sandbox, err: str) -> None:
    """The message has the folder, what is needed and what is free; nothing is left of the start."""
    last = err.splitlines()[-1]
    assert f"needs {NEEDED_MIB} MiB in {box.env['RDMALAB_CACHE_DIR']}/snapshots" in last, err
    assert "MiB are free" in last and "RDMALAB_CACHE_DIR" in last and "Traceback" not in err
    assert not list(box.cache.glob("snapshots/*")) and not list(box.cache.glob("snapshots/.*"))
    assert box.processes() == {} and not box.lab().exists()


def test_b64_a_full_disk(box: Sandbox) -> None:
    """B64: too little room is said before anything boots; room that goes while it boots, at the end
    of it; a lab that runs, and a start from a saved one, need no room at all."""
    fill(box.cache, 32)
    done = box.run("up", *HOSTS)
    assert done.code == 1 and "booting" not in done.err
    refused(box, done.err)
    make_room(box.cache)

    up = box.start("up", *HOSTS)
    assert up.until(lambda: "booting" in up.err() and (box.lab() / "qmp.sock").exists())
    fill(box.cache)
    done = up.wait()
    assert done.code == 1, done
    refused(box, done.err)
    make_room(box.cache)

    up = box.start("up", *HOSTS)
    assert up.wait().code == 0
    assert up.longest_silence_s() < SILENCE_S, "B59 (c): what takes long says so meanwhile"
    box.works()
    fill(box.cache)
    box.works()
    assert box.run("down").code == 0
    assert box.up(*HOSTS)["restored"]
    box.works()
    make_room(box.cache)
