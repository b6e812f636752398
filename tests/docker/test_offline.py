"""The bundle for a class without a network, on an engine that has nothing; and a killed engine.

The engine is one of the test's own, with no image and no way out, so that it can be killed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .engine import ROOT, Engine, run
from .test_compose import Project, gone, on_the_machine

pytestmark = [pytest.mark.docker, pytest.mark.long, pytest.mark.timeout(1800)]

ENGINE_S = 120


class OwnEngine(Engine):
    """A Docker engine in a folder: it shares nothing with the machine's, and reaches nothing.

    As on a system, it is two programs, and containers belong to containerd: they outlive dockerd.
    Its network namespace is its own: two engines in one would take each other's bridge away.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket = f"unix://{folder}/docker.sock"
        super().__init__(self.socket)
        self.network = f"rdmalabtest{os.getpid()}"
        subprocess.run(["ip", "netns", "add", self.network], check=True, timeout=30)
        inside = ["nsenter", f"--net=/run/netns/{self.network}", "ip", "link", "set", "lo", "up"]
        subprocess.run(inside, check=True, timeout=30)
        (folder / "containerd.toml").touch()
        words = ["--config", folder / "containerd.toml", "--address", folder / "containerd.sock"]
        words += ["--root", folder / "containerd", "--state", folder / "running"]
        self.containerd = self.launch("containerd", *map(str, words))
        self.dockerd: subprocess.Popen[bytes] | None = None

    def launch(self, *words: str) -> subprocess.Popen[bytes]:
        """Start one of its programs; all that it says goes to one file."""
        line = ["nsenter", f"--net=/run/netns/{self.network}", *words]
        with open(self.folder / "log", "ab") as log:
            return subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def start(self) -> None:
        """Start dockerd and wait until it answers."""
        words = ["--data-root", self.folder / "data", "--exec-root", self.folder / "exec"]
        words += ["--pidfile", self.folder / "pid", "--host", self.socket]
        words += ["--containerd", self.folder / "containerd.sock"]
        words += ["--iptables=false", "--ip6tables=false"]
        self.dockerd = self.launch("dockerd", *map(str, words))
        end = time.monotonic() + ENGINE_S
        while self.ask("version").returncode != 0:
            assert self.dockerd.poll() is None, (self.folder / "log").read_text()[-2000:]
            assert time.monotonic() < end, (self.folder / "log").read_text()[-2000:]
            time.sleep(0.5)

    def kill(self) -> None:
        """Kill dockerd; it has no time for anything."""
        assert self.dockerd is not None
        self.dockerd.kill()
        self.dockerd.wait(ENGINE_S)

    def end(self) -> None:
        """Ask both to end, when no container is left."""
        for name in self.ask("ps", "--all", "--quiet").stdout.split():
            self.ask("rm", "--force", name)
        for process in (self.dockerd, self.containerd):
            if process is not None and process.poll() is None:
                process.terminate()
                process.wait(ENGINE_S)
        subprocess.run(["ip", "netns", "delete", self.network], check=True, timeout=30)
        for place in self.mounts():  # a killed dockerd leaves its data mounted on itself
            subprocess.run(["umount", place], check=True, timeout=30)

    def mounts(self) -> list[str]:
        """What is mounted in its folder, the innermost first."""
        places = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        return [place for place in reversed(places) if place.startswith(f"{self.folder}/")]


@pytest.fixture(scope="module")
def own(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnEngine]:
    """Such an engine; its folder is gone in the end."""
    if os.geteuid() != 0 or not (shutil.which("dockerd") and shutil.which("containerd")):
        pytest.skip("it takes root, and dockerd, to start an engine")
    own = OwnEngine(tmp_path_factory.mktemp("engine"))
    try:
        own.start()
        yield own
    finally:
        own.end()
        shutil.rmtree(own.folder)


@pytest.fixture(scope="module")
def bundle(engine: Engine, image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The bundle, made on the machine's engine and unpacked elsewhere."""
    folder = tmp_path_factory.mktemp("class")
    made = run(
        [str(ROOT / "docker" / "bundle"), str(folder / "class.tar"), image], 600, env=engine.env
    )
    assert made.returncode == 0, made.stderr
    subprocess.run(["tar", "-xf", folder / "class.tar", "-C", folder], check=True, timeout=120)
    (folder / "class.tar").unlink()
    yield folder / "rdmalab-class"
    shutil.rmtree(folder)
    engine("rmi", "rdmalab:class")


def set_up(bundle: Path, own: Engine) -> subprocess.CompletedProcess[str]:
    """Run the bundle's own `setup`, from another folder."""
    return run([str(bundle / "setup")], 600, env=own.env, cwd="/")


@pytest.fixture(scope="module")
def done(bundle: Path, own: OwnEngine) -> subprocess.CompletedProcess[str]:
    """What `setup` said on an engine that had nothing."""
    return set_up(bundle, own)


def test_a_damaged_bundle_says_so_and_loads_nothing(bundle: Path, own: OwnEngine) -> None:
    whole = (bundle / "architecture").read_bytes()
    (bundle / "architecture").write_bytes(b"vax\n")
    done = set_up(bundle, own)
    (bundle / "architecture").write_bytes(whole)
    assert done.returncode == 1
    assert "damaged or missing" in done.stderr
    assert own("images", "--quiet") == ""


def test_without_docker_or_rdmalab_it_says_what_to_do(bundle: Path, tmp_path: Path) -> None:
    """As on a laptop where Docker is not started."""
    env = {"PATH": "/usr/bin:/bin", "DOCKER_HOST": f"unix://{tmp_path}/none.sock"}
    done = run([str(bundle / "setup")], 120, env=env)
    assert done.returncode == 1
    assert "No Docker engine answers" in done.stderr


def test_the_bundle_sets_a_machine_up_without_a_network(
    done: subprocess.CompletedProcess[str], own: OwnEngine
) -> None:
    """Loaded, rehearsed (SEND and WRITE with equal bytes), and the next step said."""
    assert done.returncode == 0, done.stdout + done.stderr
    assert "compose.yaml up" in done.stdout
    assert own("images", "--format", "{{.Repository}}:{{.Tag}}").split() != []


def test_its_guest_image_is_one_that_rdmalab_takes(bundle: Path, tmp_path: Path) -> None:
    """For machines without Docker."""
    env = {**os.environ, "RDMALAB_CACHE_DIR": str(tmp_path / "cache")}
    done = run(
        [sys.executable, "-m", "rdmalab", "image", "import", str(bundle / "guest.tar")],
        120,
        env=env,
    )
    assert done.returncode == 0, done.stderr
    assert "is imported" in done.stdout


def test_a_killed_engine_leaves_nothing_that_down_does_not_remove(
    done: subprocess.CompletedProcess[str], own: OwnEngine
) -> None:
    """Killed with hosts running, started again: the work is there, and then nothing is."""
    project = Project(own, "rdmalab:local")
    project.up()
    project.sh("echo kept > /work/mine.txt; rdmalab up >&2")
    processes = on_the_machine(project)
    assert any("qemu-system" in name for name in processes.values()), processes
    own.kill()
    own.start()
    project.up()
    assert gone(processes), "a container of before the kill still runs"
    assert project.sh("cat /work/mine.txt; rdmalab up >&2") == "kept"
    processes = on_the_machine(project)
    project.compose("down", "--volumes")
    assert project.left() == ""
    assert gone(processes)
