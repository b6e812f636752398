"""The guest image, really built and really booted, down to a disk that fills up in the middle.

The whole build runs once more here, as an ordinary user; other tests end it early.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from rdmalab import image, qemu, recipe
from rdmalab.cpio import write_cpio

pytestmark = [pytest.mark.image, pytest.mark.timeout(900)]

IMAGE_BYTES_MAX = 250_000_000  # the promise
BOOT_DEADLINE_S = 90.0

# A process 1 that looks around and says what it found as one line of JSON.
LOOK_AROUND = r"""
import importlib, json, os, platform, pwd, subprocess, sys, time

def run(*command):
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, (done.stdout + done.stderr).strip()

found = {"uptime_s": float(open("/proc/uptime").read().split()[0]), "kernel": platform.release()}
try:
    found["argv"] = [sys.executable, os.getpid(), sys.flags.isolated]
    seconds = {}
    for name in ("pyverbs.device", "zmq", "IPython", "ipykernel.kernelapp", "numpy"):
        start = time.monotonic()
        module = importlib.import_module(name)
        seconds[name] = round(time.monotonic() - start, 2)
    found["import_s"] = seconds
    stale = [m.__name__ for m in list(sys.modules.values())
             if getattr(m, "__cached__", None) and not os.path.exists(m.__cached__)]
    found["not_compiled"] = [name for name in stale if name != "__main__"]
    found["modules"] = run("modprobe", "-a", *MODULES)
    found["links"] = [
        run("ip", "link", "add", "dummy0", "type", "dummy"),
        run("ip", "link", "set", "dummy0", "up"),
        run("rdma", "link", "add", "rxe0", "type", "rxe", "netdev", "dummy0"),
        run("ibv_devices"),
        run("rdma", "system"),
    ]
    devices = sys.modules["pyverbs.device"].get_device_list()
    found["devices"] = [device.name.decode() for device in devices]
    found["tools"] = {name: run("which", name)[0] for name in TOOLS}
    found["learner"] = [pwd.getpwnam("learner").pw_uid, pwd.getpwnam("learner").pw_dir]
    root = os.statvfs("/")
    found["writable_mib"] = root.f_blocks * root.f_frsize >> 20
    found["etc"] = {name: open(f"/etc/{name}").read() for name in ("hostname", "resolv.conf")}
    found["tests"] = sorted(os.listdir("/usr/share/doc/rdma-core/tests"))
    found["mounts"] = open("/proc/mounts").read()
except Exception as error:
    found["error"] = repr(error)
print("FOUND " + json.dumps(found), flush=True)
open("/proc/sysrq-trigger", "w").write("o")
time.sleep(60)
"""
# fmt: off
TOOLS = [
    "ib_send_lat", "ib_write_bw", "rping", "ibv_rc_pingpong", "sockperf", "qperf",
    "tcpdump", "strace", "nft", "tc", "ip", "rdma", "ethtool", "ps", "ping", "less",
    "nsenter", "unshare", "lsmod", "nvme", "fuser", "hostname",
]
# fmt: on


@pytest.fixture(scope="module")
def guest_image() -> image.GuestImage:
    return image.find_image() or image.build_image()


def boot(
    guest_image: image.GuestImage, *words: str, files: Mapping[str, bytes], disk: Path | None
) -> str:
    """Boot without KVM, like any laptop can; returns the console's text when QEMU has ended."""
    line = qemu.base_command(qemu.find_qemu(), qemu.Accel("tcg", ""), qemu.CPUS)
    line += ["-m", "512M", "-serial", "stdio", "-kernel", str(guest_image.kernel)]
    line += ["-append", qemu.kernel_line(*words)]
    if disk:
        line += ["-drive", f"file={disk},format=raw,if=none,id=root,readonly=on"]
        line += ["-device", "virtio-blk-pci,drive=root"]
    with tempfile.NamedTemporaryFile() as initrd:
        initrd.write(guest_image.initrd.read_bytes() + (write_cpio(files) if files else b""))
        initrd.flush()
        done = subprocess.run(
            [*line, "-initrd", initrd.name],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=BOOT_DEADLINE_S,
        )
    assert done.returncode == 0, done.stderr
    return done.stdout.decode(errors="replace")


# ---------------------------------------------------------------- what was built


def test_the_image_keeps_the_promised_size(guest_image: image.GuestImage) -> None:
    assert guest_image.size_bytes <= IMAGE_BYTES_MAX
    image.verify_image(guest_image, full=True)
    versions = dict(
        line.split() for line in (guest_image.folder / "packages.list").read_text().splitlines()
    )
    assert {"rdma-core", "python3-pyverbs", "perftest", "busybox-static"} <= versions.keys()
    assert any(name.startswith("linux-") for name in versions)


def test_the_guest_has_what_labs_need(guest_image: image.GuestImage) -> None:
    """Up to process 1 by our init, with every module, tool and Python package there."""
    modules = [name.removesuffix("?") for name in _modules() if not name.endswith("?")]
    script = f"MODULES = {modules}\nTOOLS = {TOOLS}\n{LOOK_AROUND}"
    files = {"overlay/opt/rdmalab/boot.py": script.encode(), "overlay/root/note": b"laid over"}
    console = boot(guest_image, "rdmalab.tmpfs=64m", files=files, disk=guest_image.root)
    line = re.search(r"^FOUND (.*)$", console, re.M)
    assert line, console
    found = json.loads(line[1])
    print(json.dumps({key: found.get(key) for key in ("uptime_s", "import_s")}))

    assert "error" not in found, found
    assert found["argv"] == ["/usr/bin/python3", 1, 1]
    assert found["kernel"] == guest_image.meta["kernel"]
    assert found["not_compiled"] == [], "a cold start would compile these, which takes seconds"
    assert found["modules"] == [0, ""]
    assert all(code == 0 for code, _ in found["links"]), found["links"]
    assert found["devices"] == ["rxe0"]
    assert "copy-on-fork" in found["links"][-1][1], "the namespace mode is readable"
    assert [name for name, code in found["tools"].items() if code] == []
    assert found["learner"] == [1000, "/home/learner"]
    assert found["writable_mib"] == 64
    assert found["etc"] == {"hostname": "rdmalab\n", "resolv.conf": ""}, "nothing of this machine"
    assert {"base.py", "test_qp.py", "run_tests.py"} <= set(found["tests"]), "unpacked"
    assert re.search(r"^root / overlay rw", found["mounts"], re.M)


def _modules() -> list[str]:
    return recipe.names_in((recipe.GUEST / "modules.txt").read_text())


def test_a_trial_boot_says_one_word(guest_image: image.GuestImage) -> None:
    console = boot(guest_image, "rdmalab.probe", files={}, disk=None)
    assert "RDMALAB-PROBE-OK" in console and "RDMALAB-INIT-FAILED" not in console


@pytest.mark.parametrize(
    ("disk", "reason"),
    [
        ("none", "/dev/vda did not appear within 5 s"),
        ("zeros", "cannot mount the root file system"),
        ("root", "no /opt/rdmalab/boot.py was laid over the root"),
    ],
)
def test_a_boot_that_fails_says_why_and_ends(
    guest_image: image.GuestImage, disk: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "zeros").write_bytes(bytes(1 << 20))
    paths = {"zeros": tmp_path / "zeros", "root": guest_image.root}
    console = boot(guest_image, files={}, disk=paths.get(disk))
    assert f"RDMALAB-INIT-FAILED: {reason}" in console


# ---------------------------------------------------------------- building


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that other users may enter, as pytest's own may not."""
    made = Path(tempfile.mkdtemp(prefix="rdmalab-test-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def ordinary_user(folder: Path) -> Iterator[pwd.struct_passwd]:
    """A user with nothing but what useradd gives; whoever runs the tests, if that is not root."""
    if os.geteuid() != 0:
        yield pwd.getpwuid(os.geteuid())
        return
    name = f"rdmalab{os.getpid() % 10_000}"
    subprocess.run(
        ["useradd", "--create-home", "--home-dir", folder / "home", name],
        check=True,
        capture_output=True,
    )
    yield pwd.getpwnam(name)
    assert not _processes_of(pwd.getpwnam(name).pw_uid)
    subprocess.run(["userdel", "--force", name], check=True, capture_output=True)


def _processes_of(uid: int) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if entry.stat().st_uid == uid:
                found.append((entry / "cmdline").read_bytes().decode(errors="replace"))
    return found


def python_for(user: pwd.struct_passwd, folder: Path) -> list[str]:
    """A Python, and a copy of the package, that ``user`` may use; ours may lie in root's home."""
    if user.pw_uid == os.geteuid():
        return [sys.executable]
    shutil.copytree(
        Path(image.__file__).parent,
        folder / "rdmalab",
        ignore=shutil.ignore_patterns("__pycache__"),
        dirs_exist_ok=True,
    )
    ids = [f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--init-groups"]
    return ["setpriv", *ids, "--inh-caps=-all", "/usr/bin/python3"]


BUILD = """
    import json, os, sys, time
    from rdmalab import image
    start = time.monotonic()
    try:
        built = image.build_image(on_step=lambda step: print(step.detail, flush=True))
    except KeyboardInterrupt:
        sys.exit("interrupted")
    except image.ImageError as error:
        sys.exit(str(error))
    image.verify_image(built, full=True)
    print(json.dumps([os.geteuid(), built.id, built.size_bytes, time.monotonic() - start]))
"""


def environment(folder: Path, cache: Path, **more: str) -> dict[str, str]:
    package = folder if (folder / "rdmalab").exists() else Path(image.__file__).parent.parent
    names = {name: os.environ[name] for name in ("PATH", "http_proxy") if name in os.environ}
    return names | {"PYTHONPATH": str(package), "RDMALAB_CACHE_DIR": str(cache), **more}


@pytest.mark.long
def test_an_ordinary_user_builds_the_same_image(
    ordinary_user: pwd.struct_passwd, folder: Path
) -> None:
    cache = folder / "cache"
    if ordinary_user.pw_uid != os.geteuid():
        cache = Path(ordinary_user.pw_dir) / "cache"
    start = [*python_for(ordinary_user, folder), "-c", textwrap.dedent(BUILD)]
    done = subprocess.run(
        start,
        env=environment(folder, cache, HOME=ordinary_user.pw_dir),
        cwd="/",
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
    uid, image_id, size_bytes, seconds = json.loads(done.stdout.splitlines()[-1])
    print(f"built in {seconds:.0f} s")
    assert (uid, image_id) == (ordinary_user.pw_uid, image.recipe_id())
    assert size_bytes <= IMAGE_BYTES_MAX
    assert [entry.name for entry in (cache / "images").iterdir() if entry.is_dir()] == [image_id]


def mounts_below(folder: Path) -> list[str]:
    """Of any process, so that a mount in a namespace that lives on is found too."""
    found = set()
    for table in Path("/proc").glob("[0-9]*/mounts"):
        with contextlib.suppress(OSError):
            found |= {line for line in table.read_text().splitlines() if str(folder) in line}
    return sorted(found)


def processes_below(folder: Path) -> list[str]:
    """Command lines of living processes that name the folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            if str(folder).encode() in words and int(entry.name) != os.getpid():
                found.append(words[:200].replace(b"\0", b" ").decode(errors="replace"))
    return found


def eventually(check: Callable[[], object], deadline_s: float = 15.0) -> bool:
    end = time.monotonic() + deadline_s
    while not (done := bool(check())) and time.monotonic() < end:
        time.sleep(0.1)
    return done


@pytest.mark.long
@pytest.mark.parametrize(
    ("moment", "how"),
    [
        ("as ", signal.SIGINT),
        ("running apt-get update", signal.SIGTERM),
        ("extracting archives", signal.SIGINT),
        ("installing essential packages", signal.SIGKILL),
        ("installing remaining packages", signal.SIGINT),
    ],
)
def test_an_interrupted_build_leaves_nothing(
    moment: str, how: signal.Signals, folder: Path
) -> None:
    cache = folder / "cache"
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(BUILD)],
        env=environment(folder, cache, HOME=str(folder)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        try:
            assert child.stdout is not None
            for line in child.stdout:
                if line.startswith(moment):
                    break
            child.send_signal(how)
            _, said = child.communicate(timeout=60)
        finally:
            child.kill()
    assert said == ("" if how == signal.SIGKILL else "interrupted\n")
    assert eventually(lambda: not processes_below(folder)), processes_below(folder)
    assert mounts_below(folder) == []
    left = [path for path in (cache / "images").iterdir() if path.name != ".lock"]
    if how == signal.SIGKILL:  # nobody was there to clean up; the next build, or import, does
        assert [path.name[:7] for path in left] == [".build-"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RDMALAB_CACHE_DIR", str(cache))
            with pytest.raises(image.ImageError):
                image.import_image(_no_image(folder))
        left = [path for path in (cache / "images").iterdir() if path.name != ".lock"]
    assert left == []


def _no_image(folder: Path) -> Path:
    """An archive with nothing in it: importing it fails, and tidies the shelf."""
    (folder / "empty.tar").write_bytes(bytes(10240))
    return folder / "empty.tar"


MOUNT_NAMESPACE = [
    *("unshare", "--mount"),
    *([] if os.geteuid() == 0 else ["--user", "--map-root-user", "--map-auto"]),
]


@pytest.fixture
def may_mount() -> None:
    """Not every ordinary user may: some systems, and a chroot, refuse user namespaces."""
    try:
        done = subprocess.run([*MOUNT_NAMESPACE, "true"], stderr=subprocess.DEVNULL, timeout=20)
        refused = done.returncode != 0
    except subprocess.TimeoutExpired:  # unshare of util-linux 2.41 waits for its own helper then
        refused = True
    if refused:
        pytest.skip("this user may not make a mount namespace here")


@pytest.mark.usefixtures("may_mount")
def test_cleaning_up_never_deletes_what_is_mounted(folder: Path) -> None:
    """As if a killed build had left the machine's /dev/shm mounted in its folder."""
    precious = folder / "a place"
    precious.mkdir()
    (precious / "file").write_text("precious")
    stale = folder / "cache" / "images" / ".build-stale" / "tmp"
    (stale / "dev").mkdir(parents=True)
    (stale / "file").write_text("may go")
    clean = "from rdmalab import shelf\nwith shelf.locked(print), shelf.workshop(): pass"
    script = 'mount --bind "$0" "$1/dev" && mount -t tmpfs x "$1/dev" && shift && "$@"'
    done = subprocess.run(
        [*MOUNT_NAMESPACE, "sh", "-c", script, precious, stale, sys.executable, "-c", clean],
        env=environment(folder, folder / "cache", HOME=str(folder)),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert (precious / "file").read_text() == "precious"
    assert [path.name for path in (folder / "cache" / "images").iterdir()] == [".lock"]


@pytest.mark.long
@pytest.mark.usefixtures("may_mount")
def test_a_disk_that_fills_up_in_the_middle(folder: Path) -> None:
    """The look at the free space is put aside here: the disk has to fill up later."""
    cache = folder / "cache"
    cache.mkdir(mode=0o700)
    small = "from rdmalab import image; image._BUILD_BYTES = 0\n" + textwrap.dedent(BUILD)
    script = f'mount -t tmpfs -o size=200m,mode=700 small {cache} && "$@"; code=$?;'
    script += f" ls -A {cache}/images; exit $code"
    done = subprocess.run(
        [*MOUNT_NAMESPACE, "sh", "-c", script, "sh", sys.executable, "-c", small],
        env=environment(folder, cache, HOME=str(folder)),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1
    assert re.search(r"step 'packages' failed.*The likely cause: the disk is full", done.stderr)
    assert "RDMALAB_CACHE_DIR" in done.stderr
    assert done.stdout.splitlines()[-1] == ".lock", "no half image, no folder of the build"


def test_a_mirror_out_of_reach(folder: Path) -> None:
    closed = "http://127.0.0.1:9/debian"  # the discard port: nobody listens
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(BUILD)],
        env=environment(folder, folder / "cache", HOME=str(folder), RDMALAB_MIRROR=closed),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1
    assert "Debian's archive could not be reached" in done.stderr, done.stderr
    (log,) = (folder / "cache" / "logs").iterdir()
    assert str(log) in done.stderr and closed in log.read_text()
