"""In the test machine, last: labs that end, by order and by accident, leave nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import rdmalab
from rdmalab import lab as labs

from .docker_hosts import LAB, PIN, docker

DEADLINE_S = 120.0
# As on machines where the engine itself may not raise a limit: no CAP_SYS_RESOURCE.
BOUND = (
    *("prlimit", "--memlock=8388608:8388608"),
    *("setpriv", "--bounding-set=-sys_resource"),
)


def left() -> dict[str, list[str]]:
    """All that labs make on a machine, by what other programs say."""
    mark = b"RDMALAB_RUNTIME_DIR=" + os.environb[b"RDMALAB_RUNTIME_DIR"]
    stewards = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line = (entry / "cmdline").read_bytes()
            if b"rdmalab.steward" in line and mark in (entry / "environ").read_bytes():
                stewards.append(line.decode())
    rdma = subprocess.check_output(["rdma", "link"], text=True).splitlines()
    return {
        "containers": docker("ps", "--all", "--quiet", "--filter", f"label={LAB}").split(),
        "networks": docker("network", "ls", "--quiet", "--filter", f"label={LAB}").split(),
        "volumes": docker("volume", "ls", "--quiet").split(),
        "links": [line for line in rdma if "rxe_alice" in line or "rxe_bob" in line],
        "interfaces": [
            name for name in os.listdir("/sys/class/net") if name.startswith(("v", "br0"))
        ],
        "stewards": stewards,
    }


NOTHING: dict[str, list[str]] = {
    "containers": [],
    "networks": [],
    "volumes": [],
    "links": [],
    "interfaces": [],
    "stewards": [],
}


def eventually(check: Callable[[], bool], deadline_s: float = DEADLINE_S) -> bool:
    end = time.monotonic() + deadline_s
    while not (done := check()) and time.monotonic() < end:
        time.sleep(0.5)
    return done


def test_down_leaves_nothing() -> None:
    rdmalab.up(lab="shared")
    before = left()
    assert len(before["containers"]) == 5 and len(before["links"]) == 2, "this looks at the right"
    assert labs.down("shared")
    assert left() == NOTHING


def test_an_engine_that_may_not_raise_memlock_says_so_and_a_killed_one_leaves_nothing() -> None:
    """B04, and A: the engine is killed under a running lab and comes back with fewer rights."""
    rdmalab.up(lab="shared")
    kill_engine()
    start_engine(*BOUND)
    labs.down("shared")
    assert eventually(lambda: left() == NOTHING), left()
    said: list[str] = []
    lab = rdmalab.up(lab="shared", say=said.append)
    assert any("memlock" in line for line in said), said
    lab.alice.run(PIN.partition("with")[0])
    assert lab.alice.get("limit") == 8 << 20
    os.kill(lab.state.pid, signal.SIGKILL)
    assert eventually(lambda: left() == NOTHING), left()
    assert labs.down("shared") and not labs.down("shared"), "its folder was left, and that is all"


def kill_engine() -> None:
    """As a machine that is out of memory does. Its containerd ends with it; containers live on."""
    subprocess.run(["pkill", "-KILL", "-x", "dockerd"], check=True)
    alive = ["pgrep", "--runstates", "RSDI", "-x", "dockerd|containerd"]
    assert eventually(lambda: subprocess.run(alive, capture_output=True).returncode == 1)


def start_engine(*bound: str) -> None:
    """A new engine, with less than root's rights."""
    for file in ("/run/docker.pid", "/run/docker/containerd/containerd.pid"):
        Path(file).unlink(missing_ok=True)
    line = ["setsid", "--fork", *bound, "dockerd", "--storage-driver=overlay2"]
    with open("/var/log/dockerd-2.log", "wb") as log:
        subprocess.run(line, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=True)
    answers = ["docker", "version"]
    if not eventually(lambda: subprocess.run(answers, capture_output=True).returncode == 0):
        pytest.fail(Path("/var/log/dockerd-2.log").read_text()[-2000:])
