"""B63: a saved start that is damaged or does not load costs one cold boot, and says why.

Each kind of damage is in tests/unit/test_snapshot.py; here are the two that reach QEMU's door.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from rdmalab import microvm, paths
from rdmalab.errors import ImageError

from .sandbox import own_copy, private_cache, sandbox, trust

pytestmark = [pytest.mark.fabric, pytest.mark.long, pytest.mark.timeout(600)]

HOSTS = ("alice", "bob")


def flip(file: Path, place: int) -> None:
    with open(file, "r+b") as data:
        byte = os.pread(data.fileno(), 1, place)
        os.pwrite(data.fileno(), bytes([byte[0] ^ 0xFF]), place)


def test_b63_a_byte_of_the_saved_memory_is_another() -> None:
    """B63: it is noticed before a guest runs on it, and a first start takes its place."""
    with private_cache(*HOSTS) as cache, sandbox(cache) as box:
        (start,) = (cache / "snapshots").iterdir()
        own_copy(start)
        trust(start)
        assert box.up(*HOSTS)["restored"], "a copy that is trusted is as good as any"
        assert box.run("down").code == 0
        flip(start / "ram", (start / "ram").stat().st_size // 2)
        up = box.start("up", *HOSTS)
        assert up.until(lambda: "booting a guest" in up.err())
        assert "cannot be used (ram was changed after it was saved)" in up.err()
        assert up.end(signal.SIGINT).code == 130 and not start.exists()


def test_b63_a_saved_state_that_qemu_does_not_load() -> None:
    """B63: as from another build of the same version: only QEMU itself can tell."""
    with private_cache(*HOSTS) as cache, sandbox(cache) as box:
        (start,) = (cache / "snapshots").iterdir()
        own_copy(start)
        os.truncate(start / "state", (start / "state").stat().st_size // 2)
        trust(start)
        again = box.up(*HOSTS)
        assert not again["restored"]
        assert "does not load here; making a new one" in again["said"]
        box.works()
        meta = json.loads((start / "snapshot.json").read_text())
        assert meta["made_by"].startswith("QEMU emulator version")


def test_b63_a_damaged_image_never_boots(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said, and a new one is built; where that cannot be, the reason is said."""
    with private_cache() as cache, sandbox(cache) as box:
        (folder,) = (cache / "images").iterdir()
        own_copy(folder)
        flip(folder / "root.erofs", 1 << 20)

        done = box.run("up", *HOSTS, PATH=str(box.home))  # nothing to build with
        assert done.code == 1 and "Traceback" not in done.err
        assert "the checksum of root.erofs is wrong" in done.err
        assert "building the guest image" in done.err and "doctor --fix" in done.err
        assert box.qemus() == []

        heard: list[str] = []
        monkeypatch.setenv("RDMALAB_CACHE_DIR", str(cache))
        assert paths.cache_dir() == cache

        def build_image(**_: object) -> None:
            raise ImageError("this test builds none")

        monkeypatch.setattr(microvm, "build_image", build_image)
        with pytest.raises(ImageError, match="this test builds none"):
            microvm.ensure_image(heard.append)
        assert "the checksum of root.erofs is wrong" in heard[0]
        monkeypatch.undo()
