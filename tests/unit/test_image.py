"""Making, finding, verifying and carrying guest images, and what is left when that goes wrong.

Builds here are real but for mmdebstrap: in its place a script hands out a small root. The real
thing is built, and booted, by ``tests/fabric/test_image_build.py``.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rdmalab import builder, image, manifest, recipe, shelf
from rdmalab.errors import ImageError

KERNEL = "9.9.9-test"


# ---------------------------------------------------------------- builds with a small root


def small_root(folder: Path) -> None:
    """What a real root has, as far as the builder looks."""
    for pattern in recipe.REQUIRED:
        path = folder / pattern.replace("*", "13")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{path.name}\n")
    modules = folder / "usr/lib/modules" / KERNEL
    modules.mkdir(parents=True)
    for name in recipe.INITRD_MODULES:
        (modules / f"{name}.ko").write_bytes(b"\x7fELF")
    names = [f"{name}.ko:\n" for name in recipe.INITRD_MODULES]
    (modules / "modules.dep").write_text("".join(names))
    boot = folder / "boot"
    boot.mkdir()
    (boot / "kernel").write_bytes(b"MZ" + bytes(range(256)) * 100)
    (boot / "busybox").write_bytes(b"\x7fELF")
    (boot / "packages.list").write_text("rdma-core 56.1-1\n")
    (boot / "kernel-version").write_text(KERNEL + "\n")


class Stage:
    """A cache folder of our own, and a mmdebstrap that does what the test says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cache = folder / "cache"
        self.programs = folder / "programs"
        self.programs.mkdir()
        shutil.copy("/bin/sleep", self.programs / "nap")  # a process that names our folder
        small_root(folder / "root")
        with tarfile.open(folder / "root.tar", "w") as tar:
            tar.add(folder / "root", ".")
        self.plays("")

    def plays(self, script: str) -> None:
        """mmdebstrap runs ``script`` (sh) and hands out the small root as its last argument."""
        program = self.programs / "mmdebstrap"
        text = """\
            #!/bin/sh
            set -e
            [ "$1" != --unshare-helper ] || exit 1
            here=HERE
            for target; do :; done
            echo run >> $here/runs
            echo 'I: running apt-get update...' >&2
            SCRIPT
            echo 'I: installing remaining packages inside the chroot...'
            echo 'Setting up x (1) ...'
            echo 'I: rdmalab: fetching the kernel'
            cp $here/root.tar "$target"
        """
        text = textwrap.dedent(text).replace("HERE", str(self.folder)).replace("SCRIPT", script)
        program.write_text(text)
        program.chmod(0o755)

    @property
    def runs(self) -> int:
        """How often mmdebstrap was started."""
        runs = self.folder / "runs"
        return len(runs.read_text().splitlines()) if runs.exists() else 0

    @property
    def leftovers(self) -> list[str]:
        """Folders of builds that did not clean up, here and where mmdebstrap may have worked."""
        return [path.name for path in (self.cache / "images").glob(".build-*")]

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PATH": f"{self.programs}:{os.environ['PATH']}",
            "PYTHONPATH": str(Path(image.__file__).parent.parent),
            "RDMALAB_CACHE_DIR": str(self.cache),
        }

    @contextlib.contextmanager
    def start(self) -> Iterator[subprocess.Popen[str]]:
        """A build in a process of its own; prints every detail, and in the end how it ended."""
        code = """
            from rdmalab import image
            try:
                print("built", image.build_image(on_step=lambda s: print(s.detail, flush=True)).id)
            except KeyboardInterrupt:
                print("interrupted")
        """
        with subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code)],
            env=os.environ | self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as child:
            try:
                yield child
            finally:
                child.kill()


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    made = Stage(tmp_path)
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    yield made
    assert not processes_below(tmp_path), "a program outlived its build"


def processes_below(folder: Path) -> list[str]:
    """Command lines of living processes that name the folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if str(folder) in line and entry.parent.name != str(os.getpid()):
                found.append(line)
    return found


def eventually(check: Callable[[], bool], deadline_s: float = 10.0) -> bool:
    end = time.monotonic() + deadline_s
    while not (done := check()) and time.monotonic() < end:
        time.sleep(0.05)
    return done


def test_a_build_is_complete(stage: Stage) -> None:
    steps: list[image.Step] = []
    built = image.build_image(on_step=steps.append)
    assert built.id == image.recipe_id() and built.folder == stage.cache / "images" / built.id
    assert built.kernel.read_bytes().startswith(b"MZ")
    assert built.initrd.read_bytes().startswith(b"070701")
    assert built.meta["kernel"] == KERNEL and built.meta["arch"] == built.arch
    assert built.size_bytes == sum((built.folder / name).stat().st_size for name in manifest.FILES)
    assert stage.leftovers == []
    image.verify_image(built, full=True)

    shares = [step.done_fraction for step in steps]
    assert shares == sorted(shares) and shares[-1] == 1.0
    assert list(dict.fromkeys(step.name for step in steps)) == [
        "packages",
        "kernel",
        "root file system",
        "initrd",
        "check",
    ]
    assert all(step.total == 5 and 1 <= step.number <= 5 for step in steps)
    assert "Setting up x" in [step.detail for step in steps]


def test_the_root_file_system_belongs_to_root_alone(stage: Stage) -> None:
    root = image.build_image().root
    unpacked = stage.folder / "unpacked"
    subprocess.run(
        ["fsck.erofs", f"--extract={unpacked}", root], check=True, capture_output=True, timeout=60
    )
    assert (unpacked / "usr/bin/rdma").read_text() == "rdma\n"
    assert (unpacked / "boot").is_dir() and not list((unpacked / "boot").iterdir())
    if os.geteuid() == 0:
        assert {path.lstat().st_uid for path in unpacked.rglob("*")} == {0}


def test_an_unchanged_recipe_is_never_built_again(stage: Stage) -> None:
    first = image.build_image()
    assert image.build_image() == first == image.find_image() and stage.runs == 1
    assert image.build_image(force=True) == first and stage.runs == 2


def test_nothing_is_found_before_the_first_build(stage: Stage) -> None:
    assert image.find_image() is None
    with pytest.raises(ImageError, match="no guest image to export"):
        image.export_image(stage.folder / "x.tar")


def test_a_failed_build_names_step_cause_and_log(stage: Stage) -> None:
    stage.plays("echo 'E: Failed to fetch http://m.example Could not resolve m.example'; exit 25")
    with pytest.raises(ImageError) as caught:
        image.build_image()
    message = str(caught.value)
    assert "step 'packages' failed, mmdebstrap ended with exit code 25" in message
    assert "Debian's archive could not be reached" in message and "RDMALAB_MIRROR" in message
    (log,) = (stage.cache / "logs").iterdir()
    assert str(log) in message and "Could not resolve m.example" in log.read_text()
    assert stage.leftovers == [] and image.find_image() is None

    stage.plays("")
    assert image.build_image(), "the next one just works"


def test_a_root_that_lacks_something_is_no_image(stage: Stage) -> None:
    with tarfile.open(stage.folder / "root.tar", "w") as tar:
        (stage.folder / "root/usr/bin/rdma").unlink()
        tar.add(stage.folder / "root", ".")
    with pytest.raises(ImageError, match="lacks usr/bin/rdma"):
        image.build_image()


def test_only_the_last_logs_are_kept(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    for minute in range(12):
        monkeypatch.setattr(shelf.time, "strftime", lambda form, m=minute: f"20261129-1200{m:02}")
        sentence = shelf.keep_log(f"log {minute}")
    assert "-120011-" in sentence
    kept = sorted(path.read_text() for path in (stage.cache / "logs").iterdir())
    assert len(kept) == 10 and "log 11\n" in kept and "log 0\n" not in kept


def test_a_missing_tool_is_named_by_its_package(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image, "present", lambda probe: probe != "mkfs.erofs")
    with pytest.raises(ImageError, match=r"needs: erofs-utils\. .*doctor --fix"):
        image.build_image()


def test_another_architecture_needs_an_emulator(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = next(name for name in recipe.ARCHES if name != recipe.debian_arch())
    monkeypatch.setitem(recipe.ARCHES, other, "no-such-machine")
    with pytest.raises(ImageError, match="qemu-user-static"):
        image.build_image(arch=other)


def test_too_little_space_is_seen_before_anything_is_fetched(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        shelf.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 200_000_000)
    )
    with pytest.raises(ImageError, match=r"needs 1\.0 GB in .*0\.2 GB are free.*RDMALAB_CACHE_DIR"):
        image.build_image()
    assert stage.runs == 0


def test_a_disk_that_fills_up_in_the_middle(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> bytes:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(builder, "write_cpio", full)
    with pytest.raises(ImageError, match=r"'initrd' failed, No space left.*Make room"):
        image.build_image()
    assert stage.leftovers == []


# ---------------------------------------------------------------- interrupted, killed, twice

NAPS = "nap=$here/programs/nap; $nap 600 & setsid $nap 600 & $nap 600"


def wait_for(child: subprocess.Popen[str], text: str) -> None:
    """Read what the build says until ``text``; its end without it is a failure."""
    assert child.stdout is not None
    seen = []
    for line in child.stdout:
        seen.append(line)
        if text in line:
            return
    pytest.fail(f"never said {text!r}: {seen}")


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_build_leaves_nothing(stage: Stage, how: signal.Signals) -> None:
    stage.plays(NAPS)
    with stage.start() as child:
        wait_for(child, "running apt-get update")
        assert eventually(lambda: len(processes_below(stage.programs / "nap")) == 3)
        child.send_signal(how)
        output, _ = child.communicate(timeout=20)
        assert output.endswith("interrupted\n")
    assert eventually(lambda: not processes_below(stage.folder))
    assert stage.leftovers == [] and image.find_image() is None
    stage.plays("")
    assert image.build_image()


def test_a_killed_build_leaves_no_process_and_the_next_one_cleans_up(stage: Stage) -> None:
    stage.plays(NAPS)
    with stage.start() as child:
        wait_for(child, "running apt-get update")
        assert eventually(lambda: len(processes_below(stage.programs / "nap")) == 3)
        child.kill()
    assert eventually(lambda: not processes_below(stage.folder))
    assert len(stage.leftovers) == 1
    stage.plays("")
    assert image.build_image() and stage.leftovers == []


def test_of_two_builds_at_once_the_second_takes_the_firsts(stage: Stage) -> None:
    stage.plays("$here/programs/nap 2")
    with stage.start() as first:
        wait_for(first, "running apt-get update")
        said: list[str] = []
        built = image.build_image(on_step=lambda step: said.append(step.detail))
        assert any("another rdmalab is making an image" in detail for detail in said)
        assert f"built {built.id}" in first.communicate(timeout=20)[0]
    assert stage.runs == 1


def test_nobody_waits_for_the_lock_for_ever(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelf, "_LOCK_DEADLINE_S", -1.0)
    with (
        shelf.locked(lambda text: None),
        pytest.raises(ImageError, match="Another rdmalab"),
        shelf.locked(lambda text: None),
    ):
        pytest.fail("two held the lock")


def test_a_shelf_that_cannot_be_written(stage: Stage) -> None:
    (stage.cache).mkdir(mode=0o700)
    (stage.cache / "images").write_text("no folder")
    for call in (image.build_image, image.find_image):
        with pytest.raises(ImageError, match=r"images cannot be written .*RDMALAB_CACHE_DIR"):
            call()


# ---------------------------------------------------------------- damage


def damage_truncated(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def damage_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("name", manifest.FILES)
@pytest.mark.parametrize("how", [damage_truncated, damage_byte, Path.unlink])
def test_a_damaged_image_is_never_used(
    stage: Stage, name: str, how: Callable[[Path], None]
) -> None:
    built = image.build_image()
    how(built.folder / name)
    with pytest.raises(ImageError, match=f"damaged: .*{name}.*rdmalab image build"):
        image.find_image()
    with pytest.raises(ImageError):
        image.export_image(stage.folder / "out.tar")
    said: list[str] = []
    again = image.build_image(on_step=lambda step: said.append(step.detail))
    image.verify_image(again, full=True)
    assert any("is damaged" in detail and "built again" in detail for detail in said)
    assert stage.leftovers == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"files": {}}', '{"files": {"kernel": 1}}'])
def test_a_damaged_description_is_damage(stage: Stage, text: str) -> None:
    built = image.build_image()
    (built.folder / manifest.META).write_text(text)
    with pytest.raises(ImageError, match="image.json .*damaged"):
        image.find_image()


def test_files_are_read_again_only_if_they_changed(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = image.build_image()
    read: list[str] = []
    real = manifest._sha256
    monkeypatch.setattr(manifest, "_sha256", lambda file: (read.append(file.name), real(file))[1])
    image.find_image()
    assert read == []
    os.utime(built.initrd)
    image.find_image()
    assert sorted(read) == sorted(manifest.FILES)
    image.find_image()
    assert len(read) == len(manifest.FILES), "the look was remembered"
    (built.folder / "verified.json").write_text("no json")
    image.find_image()
    assert len(read) == 2 * len(manifest.FILES)


# ---------------------------------------------------------------- export and import


def test_an_image_travels_in_a_file(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    file = stage.folder / "image.tar"
    sent = image.export_image(file) if image.build_image() else None
    assert sent is not None
    with tarfile.open(file) as tar:
        assert tar.getnames() == [manifest.META, *manifest.FILES]
        assert {member.uname for member in tar} == {"root"}, "nobody's name travels along"

    monkeypatch.setenv("RDMALAB_CACHE_DIR", str(stage.folder / "other"))
    received = image.import_image(file)
    assert received == image.find_image() and received.folder != sent.folder
    for name in manifest.FILES:
        assert (received.folder / name).read_bytes() == (sent.folder / name).read_bytes()
    assert image.import_image(file) == received, "again, over the one that is there"


def test_an_export_that_cannot_be_written_leaves_no_part(stage: Stage) -> None:
    image.build_image()
    with pytest.raises(ImageError, match=r"missing/x\.tar cannot be written"):
        image.export_image(stage.folder / "missing" / "x.tar")
    (stage.folder / "folder").mkdir()
    with pytest.raises(ImageError, match="cannot be written"):
        image.export_image(stage.folder / "folder")
    assert not list(stage.folder.glob(".*.part"))


Forged = dict[str, bytes]


def forge(file: Path, members: Forged, kinds: dict[str, bytes] | None = None) -> None:
    """A tar file with ``members``; ``kinds`` makes some of them links."""
    with tarfile.open(file, "w") as tar:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.type = (kinds or {}).get(name, tarfile.REGTYPE)
            if member.issym() or member.islnk():
                member.linkname = data.decode()
                tar.addfile(member)
            else:
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


def genuine(stage: Stage) -> Forged:
    folder = image.build_image().folder
    return {name: (folder / name).read_bytes() for name in (manifest.META, *manifest.FILES)}


def with_meta(members: Forged, **changes: object) -> Forged:
    return members | {
        manifest.META: json.dumps(json.loads(members[manifest.META]) | changes).encode()
    }


def test_an_import_takes_only_what_fits(stage: Stage) -> None:
    good = genuine(stage)
    file = stage.folder / "x.tar"
    other = next(name for name in recipe.ARCHES if name != recipe.debian_arch())
    for members, sentence in [
        (with_meta(good, arch=other), f"is an image for {other}, and this machine is"),
        (with_meta(good, id="0123456789abcdef"), "was built from another recipe"),
        (with_meta(good, files={}), "image.json of .* is damaged"),
        (good | {"root.erofs": bytes(len(good["root.erofs"]))}, "checksum of root.erofs is wrong"),
        (good | {"initrd": good["initrd"][:-1]}, "initrd has .* bytes instead of"),
        (good | {"initrd": good["initrd"] + b"x"}, "initrd has .* bytes instead of"),
        ({"readme": b"hello"}, "is no exported guest image"),
        ({}, "is no exported guest image"),
    ]:
        forge(file, members)
        with pytest.raises(ImageError, match=sentence):
            image.import_image(file)
    assert stage.leftovers == []
    assert image.find_image(), "the image that was there has stayed"


def test_an_import_follows_no_link_and_writes_nothing_elsewhere(stage: Stage) -> None:
    good = genuine(stage)
    file = stage.folder / "x.tar"
    secret = stage.folder / "secret"
    secret.write_bytes(good["initrd"])
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
        forge(file, good | {"initrd": str(secret).encode()}, {"initrd": kind})
        with pytest.raises(ImageError):
            image.import_image(file)
    forge(file, {"../../escaped": b"x", "/tmp/escaped": b"x", **good})
    image.import_image(file)
    assert not list(stage.folder.rglob("escaped"))


@pytest.mark.parametrize("content", [b"", b"no tar", bytes(10240), None])
def test_a_file_that_is_no_archive(stage: Stage, content: bytes | None) -> None:
    file = stage.folder / "x.tar"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ImageError, match=r"x\.tar (cannot be imported|is no exported)"):
        image.import_image(file)


def test_a_truncated_archive(stage: Stage) -> None:
    file = stage.folder / "x.tar"
    forge(file, genuine(stage))
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(ImageError, match=r"x\.tar"):
        image.import_image(file)


def test_the_doctor_and_the_builder_mean_the_same_tools() -> None:
    needed = image.build_requirements()
    assert needed["mmdebstrap"] == "mmdebstrap" and needed["mkfs.erofs"] == "erofs-utils"


def test_a_chosen_mirror_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RDMALAB_MIRROR", "http://classroom.example/debian")
    assert image._mirror() == recipe.Mirror("http://classroom.example/debian", "")
    monkeypatch.setenv("RDMALAB_SECURITY_MIRROR", "http://classroom.example/security")
    assert image._mirror().security == "http://classroom.example/security"


def test_images_of_older_recipes_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest three stay: a second checkout, or an export, may still want its own."""
    monkeypatch.setenv("RDMALAB_CACHE_DIR", str(tmp_path / "cache"))
    for number in range(5):
        result = tmp_path / f"result-{number}"
        result.mkdir()
        shelf.publish(result, f"id{number}", tmp_path / "aside")
        os.utime(shelf.images_dir() / f"id{number}", (1000 + number, 1000 + number))
    assert sorted(folder.name for folder in shelf.images_dir().glob("id*")) == ["id2", "id3", "id4"]
