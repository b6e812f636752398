"""Saved guests on the disk: found only whole, made only complete, one maker never hurts another."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from rdmalab import snapshot
from rdmalab.errors import BackendError, MachineError

QEMU = "QEMU emulator version 7.2.0"
NEXT_QEMU = "QEMU emulator version 8.0.0"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("RDMALAB_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def save(key: str, made_by: str = QEMU) -> snapshot.Snapshot:
    """A small snapshot: 1 MiB of memory with one page in use."""
    with snapshot.make(1) as new:
        with open(new.ram, "r+b") as ram:
            ram.seek(300_000)
            ram.write(b"memory " * 600)
        new.state.write_bytes(b"devices " * 1000)
        return snapshot.publish(new, key, made_by)


def test_memory_is_kept_page_by_page_and_what_was_cleared_is_gone(tmp_path: Path) -> None:
    """What a guest wrote, where it wrote it; nothing of the try before; holes stay holes."""
    file = tmp_path / "ram"
    file.write_bytes(b"")
    os.truncate(file, 8 << 20)
    with snapshot.memory(8 << 20) as fd:
        os.pwrite(fd, b"of a guest that panicked", 2 << 20)
        snapshot.clear(fd)
        os.pwrite(fd, b"first", 0)
        os.pwrite(fd, b"x" * 10_000, (5 << 20) + 77)
        os.pwrite(fd, b"last", (8 << 20) - 4)
        snapshot.keep(fd, file)
    expected = bytearray(8 << 20)
    expected[:5] = b"first"
    expected[(5 << 20) + 77 : (5 << 20) + 10_077] = b"x" * 10_000
    expected[-4:] = b"last"
    assert file.read_bytes() == expected
    assert file.stat().st_blocks * 512 < 1 << 20


def leftovers(cache: Path) -> list[str]:
    return [entry.name for entry in (cache / "snapshots").iterdir() if entry.name.startswith(".")]


def later(file: Path) -> None:
    """Give a file another time stamp than the one it had when it was saved."""
    info = file.stat()
    os.utime(file, ns=(info.st_atime_ns, info.st_mtime_ns + 1))


# ---------------------------------------------------------------- keys and files


def test_every_fact_is_in_the_key() -> None:
    keys = {snapshot.snapshot_key(*facts) for facts in [("a", "b"), ("b", "a"), ("ab", ""), ("a",)]}
    assert len(keys) == 4 and all(len(key) == 16 for key in keys)
    assert snapshot.snapshot_key("a", "b") == snapshot.snapshot_key("a", "b")


def test_what_was_saved_is_found(cache: Path) -> None:
    made = save("0" * 16)
    found, why_not = snapshot.find("0" * 16, QEMU)
    assert found == made and why_not == ""
    assert made.ram.stat().st_size == 1 << 20 and leftovers(cache) == []


def test_nothing_is_found_at_first() -> None:
    assert snapshot.find("0" * 16, QEMU) == (None, "")


# ---------------------------------------------------------------- damage (B63)


def truncate(made: snapshot.Snapshot, name: str) -> None:
    os.truncate(made.folder / name, (made.folder / name).stat().st_size - 1)


def flip(made: snapshot.Snapshot, name: str) -> None:
    with open(made.folder / name, "r+b") as file:
        file.seek(300_001 if name == "ram" else 7)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    later(made.folder / name)


def copy_in_place(made: snapshot.Snapshot, name: str) -> None:
    """What a back-up brings back: the same size and time, and who knows which bytes."""
    file = made.folder / name
    shutil.copy2(file, file.with_suffix(".copy"))
    file.with_suffix(".copy").rename(file)


def other_qemu(made: snapshot.Snapshot) -> None:
    file = made.folder / "snapshot.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "made_by": NEXT_QEMU}))


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (lambda made: truncate(made, "ram"), "ram has 1048575 bytes instead of 1048576"),
        (lambda made: truncate(made, "state"), "state has 7999 bytes instead of 8000"),
        (lambda made: made.ram.unlink(), "cannot be read"),
        (lambda made: made.state.unlink(), "cannot be read"),
        (lambda made: flip(made, "ram"), "ram was changed after it was saved"),
        (lambda made: flip(made, "state"), "state was changed after it was saved"),
        (lambda made: copy_in_place(made, "ram"), "ram was changed after it was saved"),
        (lambda made: (made.folder / "snapshot.json").unlink(), "snapshot.json cannot be read"),
        (lambda made: (made.folder / "snapshot.json").write_text("{"), "snapshot.json cannot"),
        (lambda made: (made.folder / "snapshot.json").write_text("[]"), "snapshot.json cannot"),
        (lambda made: (made.folder / "snapshot.json").write_text('{"ram": 1}'), "snapshot.json"),
        (lambda made: (made.folder / "snapshot.json").write_bytes(b"\xff\0"), "snapshot.json"),
        (other_qemu, f"it was saved by {NEXT_QEMU}, and this is {QEMU}"),
    ],
)
def test_b63_a_damaged_snapshot_is_named_and_taken_away(
    harm: Callable[[snapshot.Snapshot], object], why: str, cache: Path
) -> None:
    """B63: never loaded, never met again, and a new one can take its place."""
    made = save("0" * 16)
    harm(made)
    found, why_not = snapshot.find("0" * 16, QEMU)
    assert found is None and why in why_not
    assert not made.folder.exists()
    save("0" * 16)
    assert snapshot.find("0" * 16, QEMU)[0] is not None


def test_b63_after_an_upgrade_of_qemu_the_reason_is_said() -> None:
    """B63: the new QEMU has another key; that it finds nothing is no riddle."""
    save("0" * 16, QEMU)
    found, why_not = snapshot.find("1" * 16, NEXT_QEMU)
    assert found is None
    assert why_not == f"saved by {QEMU}, and this is {NEXT_QEMU}"
    assert snapshot.find("2" * 16, QEMU) == (None, ""), "other hosts, same QEMU: no reason at all"


# ---------------------------------------------------------------- makers


@pytest.mark.parametrize("error", [KeyboardInterrupt(), BackendError("the guest died")])
def test_b65_a_maker_that_is_stopped_leaves_nothing(error: BaseException, cache: Path) -> None:
    with pytest.raises(type(error)), snapshot.make(1):
        raise error
    assert list((cache / "snapshots").iterdir()) == []


def test_b65_what_a_killed_maker_left_is_swept(cache: Path) -> None:
    """B65: the kernel freed its lock, so the next one knows."""
    code = "import os; from rdmalab import snapshot\nwith snapshot.make(1): os.kill(os.getpid(), 9)"
    killed = subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    assert killed.returncode == -9 and len(leftovers(cache)) == 1
    snapshot.sweep()
    assert leftovers(cache) == []


def test_a_living_makers_folder_is_not_swept(cache: Path) -> None:
    with snapshot.make(1) as new:
        snapshot.sweep()
        assert new.ram.exists()
    assert leftovers(cache) == []


def test_makers_at_the_same_instant_do_not_take_each_others_folders(cache: Path) -> None:
    """Each sweeps before it makes its own; none may find another's not yet locked."""
    errors: list[BaseException] = []
    start = threading.Barrier(8)

    def make() -> None:
        try:
            start.wait(30)
            for _ in range(10):
                with snapshot.make(1) as new:
                    assert new.ram.stat().st_size == 1 << 20
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == [] and leftovers(cache) == []


def test_of_two_makers_of_one_snapshot_the_first_wins(cache: Path) -> None:
    """Labs may be running from it already; the second takes it as its own."""
    first = save("0" * 16)
    inode = first.ram.stat().st_ino
    assert save("0" * 16) == first
    assert first.ram.stat().st_ino == inode and leftovers(cache) == []


def test_only_the_latest_used_are_kept(cache: Path) -> None:
    first, second, *others = (f"{number:016x}" for number in range(snapshot.KEPT + 1))
    for age, key in enumerate([first, second, *others[:-1]]):
        save(key)
        os.utime(cache / "snapshots" / key, (age, age))
    snapshot.find(first, QEMU)  # used again just now
    save(others[-1])
    assert {entry.name for entry in (cache / "snapshots").iterdir()} == {first, *others}


# ---------------------------------------------------------------- a full disk (B64)


def test_b64_too_little_room_is_said_before_anything_starts(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B64: the folder, what it takes and what there is."""
    usage = shutil.disk_usage(cache.parent)._replace(free=5 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(MachineError) as caught, snapshot.make(100):
        raise AssertionError("no guest may start")
    assert f"needs 164 MiB in {cache / 'snapshots'}, and 5 MiB are free" in str(caught.value)
    assert "RDMALAB_CACHE_DIR" in caught.value.next_step
    monkeypatch.undo()
    assert list((cache / "snapshots").iterdir()) == []


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), BackendError("migration failed")]
)
def test_b64_a_disk_that_fills_meanwhile_is_the_cause_that_is_named(
    error: Exception, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B64: whatever it was that failed for want of room."""
    usage = shutil.disk_usage(cache.parent)
    with pytest.raises(MachineError, match="65 MiB in .* and 1 MiB are free"):  # noqa: SIM117 - order
        with snapshot.make(1):
            monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
            raise error
    monkeypatch.undo()
    assert list((cache / "snapshots").iterdir()) == []


def test_another_failure_is_not_blamed_on_the_disk() -> None:
    with pytest.raises(BackendError, match="the guest died"), snapshot.make(1):
        raise BackendError("the guest died")
