"""Ready-made starts in a folder that somebody else made: found, unpacked, mapped where they lie."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rdmalab import image, manifest, packing, paths, recipe, shared, snapshot
from rdmalab.errors import BackendError, MachineError
from rdmalab.qemu import Qemu

KEY = "0123456789abcdef"
SIZE = 4 << 20
OLD = Qemu("/usr/bin/qemu", (7, 2), "QEMU emulator version 7.2.0")
NEW = Qemu("/usr/bin/qemu", (10, 0), "QEMU emulator version 10.0.0")


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, and the folder that others have made."""
    monkeypatch.setenv("RDMALAB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("RDMALAB_SHARED_DIR", f"{tmp_path / 'none'}:{tmp_path / 'shared'}")
    return tmp_path / "shared"


def made(folder: Path) -> manifest.GuestImage:
    """A complete image with small files."""
    folder.mkdir(parents=True)
    for name in manifest.FILES:
        (folder / name).write_bytes(name.encode() * 3000)
    return manifest.complete(folder, recipe.debian_arch(), "9.9.9-test")


def share(folder: Path, tmp_path: Path, *, small: bool) -> bytes:
    """Share an image and a start with two used places in 4 MiB of memory; the memory."""
    kept = made(tmp_path / "theirs" / recipe.recipe_id())
    with snapshot.make(SIZE >> 20) as new:
        with open(new.ram, "r+b") as ram:
            ram.write(b"first" * 1000)
            ram.seek(3 << 20)
            ram.write(b"last" * 1000)
        new.state.write_bytes(b"devices " * 1000)
        memory = new.ram.read_bytes()
        saved = snapshot.publish(new, KEY, NEW.banner)
    shared.write(folder, kept, saved, small=small)
    snapshot.remove(saved)
    return memory


def heard(said: list[str]) -> str:
    return "\n".join(said)


@pytest.mark.parametrize(("small", "qemu"), [(True, NEW), (True, OLD), (False, OLD)])
def test_a_start_is_taken_into_the_users_own_cache(
    folders: Path, tmp_path: Path, small: bool, qemu: Qemu
) -> None:
    """Byte for byte, with holes where nothing was, and found there from then on."""
    memory = share(folders, tmp_path, small=small)
    said: list[str] = []
    found = shared.find(KEY, qemu, said.append)
    assert found is not None, heard(said)
    assert found.folder.parent == paths.cache_dir() / "snapshots"
    assert found.ram.read_bytes() == memory
    assert found.ram.stat().st_blocks * 512 < SIZE // 2
    again, why_not = snapshot.find(KEY, qemu.banner)
    assert again == found, why_not


def test_a_new_qemu_maps_it_where_it_lies(folders: Path, tmp_path: Path) -> None:
    """One copy for all labs of a machine: nothing comes into the cache."""
    memory = share(folders, tmp_path, small=False)
    found = shared.find(KEY, NEW, print)
    assert found is not None
    assert found.folder == folders / "snapshots" / KEY
    assert found.ram.read_bytes() == memory
    assert found.ram.stat().st_blocks * 512 < SIZE // 2
    snapshot.remove(found)  # as after a restore that failed: it is not ours to take away
    assert found.ram.exists()


def test_everybody_may_read_it_and_a_second_time_changes_nothing(
    folders: Path, tmp_path: Path
) -> None:
    share(folders, tmp_path, small=True)
    files = [path for path in folders.rglob("*") if path.is_file()]
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in files)
    before = {path: path.stat().st_mtime_ns for path in files}
    (tmp_path / "theirs").rename(tmp_path / "before")
    share(folders, tmp_path, small=True)
    assert {path: path.stat().st_mtime_ns for path in files} == before


@pytest.mark.parametrize("damage", ["cut", "changed", "no facts", "another size"])
def test_what_is_damaged_is_named_and_not_used(folders: Path, tmp_path: Path, damage: str) -> None:
    share(folders, tmp_path, small=True)
    there = folders / "snapshots" / KEY
    packed = there / "ram.zst"
    if damage == "cut":
        packed.write_bytes(packed.read_bytes()[:-20])
    elif damage == "changed":
        data = bytearray(packed.read_bytes())
        data[len(data) // 2] ^= 0xFF
        packed.write_bytes(data)
    elif damage == "no facts":
        (there / "snapshot.json").write_text("{}")
    else:
        facts = json.loads((there / "snapshot.json").read_text())
        facts["ram"]["size"] += 4096
        (there / "snapshot.json").write_text(json.dumps(facts))
    said: list[str] = []
    assert shared.find(KEY, NEW, said.append) is None
    assert f"the saved start in {there} cannot be used (" in heard(said)
    assert list((paths.cache_dir() / "snapshots").iterdir()) == []


def test_another_machines_start_is_not_found(folders: Path, tmp_path: Path) -> None:
    share(folders, tmp_path, small=True)
    assert shared.find("f" * 16, NEW, print) is None


def test_without_zstd_the_next_step_is_said(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share(folders, tmp_path, small=True)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MachineError, match="doctor --fix"):
        shared.find(KEY, NEW, print)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(MachineError, match="file"):
        share(tmp_path / "file" / "folder", tmp_path, small=False)


# ---------------------------------------------------------------- the image


def test_a_packed_kernel_is_unpacked_and_the_rest_stays_where_it_lies(
    folders: Path, tmp_path: Path
) -> None:
    share(folders, tmp_path, small=True)
    found = image.find_image()
    assert found is not None
    assert found.folder.parent == paths.cache_dir() / "images"
    assert found.kernel.read_bytes() == b"kernel" * 3000
    assert not found.kernel.is_symlink()
    assert found.root.resolve() == folders / "images" / found.id / "root.erofs"
    assert image.find_image() == found
    manifest.verify_image(found, full=True)


def test_a_rebuilt_image_of_the_same_recipe_does_not_get_the_old_kernel(
    folders: Path, tmp_path: Path
) -> None:
    """As after an upgrade of a container whose cache is on a volume."""
    share(folders, tmp_path, small=True)
    first = image.find_image()
    (folders / "images").rename(tmp_path / "of before")
    other = made(tmp_path / "other" / recipe.recipe_id())
    other.kernel.write_bytes(b"newer!" * 3000)
    manifest.complete(other.folder, other.arch, "9.9.10-test")
    with shared.aside(folders / "images" / other.id) as new:
        for name in (manifest.META, *manifest.FILES):
            (new / name).write_bytes((other.folder / name).read_bytes())
        packing.pack(new / "kernel", new / "kernel.zst")
        (new / "kernel").unlink()
    second = image.find_image()
    assert first is not None and second is not None
    assert second.kernel.read_bytes() == b"newer!" * 3000
    assert second.folder != first.folder


def test_an_own_image_comes_first(folders: Path, tmp_path: Path) -> None:
    share(folders, tmp_path, small=True)
    own = made(paths.cache_dir() / "images" / recipe.recipe_id())
    assert image.find_image() == own


def test_a_file_that_is_no_pack_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.zst").write_bytes(b"no pack")
    with pytest.raises(BackendError, match="zstd ended with"):
        packing.unpack(tmp_path / "x.zst", tmp_path / "x")
