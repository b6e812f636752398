"""The machine that the other backends are tested in is what it promises to be."""

from __future__ import annotations

import json
import re
import socket
import time

import pytest

from rdmalab.errors import BackendError
from rdmalab.paths import runtime_dir

from . import disks
from .machine import Machine, started

pytestmark = pytest.mark.timeout(900)  # the first test waits for the disks and the boot


def test_it_has_what_the_backends_need(machine: Machine) -> None:
    release = machine.run("uname -r").out
    major, minor = map(int, re.findall(r"\d+", release)[:2])
    assert (major, minor) >= (7, 1), "the first with rxe in network namespaces"
    made = "ip link add d0 type dummy; ip link set d0 up; rdma link add t0 type rxe netdev d0"
    assert machine.run("rdma link").out == "", "no link is left over, and none there from the start"
    shown = machine.run(f"{made}; rdma link; ibv_devices; rdma link delete t0; ip link delete d0")
    assert "link t0/1 state ACTIVE" in shown.out and "t0" in shown.out.splitlines()[-1]
    info = json.loads(machine.run("docker info --format '{{json .}}'").out)
    assert (info["Driver"], info["CgroupVersion"]) == ("overlay2", "2")


def test_a_command_ends_as_it_would_here(machine: Machine) -> None:
    ran = machine.run("echo a; echo b >&2; echo $X; exit 3", check=False, env={"X": "ü"})
    assert ran == (3, "a\nü\n", "b\n")
    assert machine.run("kill -9 $$", check=False).code == -9
    assert machine.run(["/no/such/program"], check=False).code == 127
    with pytest.raises(BackendError, match=r"'echo why; false' ended with exit code 1\.\nwhy"):
        machine.run("echo why; false")
    size = 3_000_000
    assert len(machine.run(f"head -c {size} /dev/zero | tr '\\0' x").out) == size
    begin = time.monotonic()
    machine.run("sleep 60 &")
    assert time.monotonic() - begin < 30, "nobody waits for what stays in the background"
    machine.run("pkill sleep")


def test_output_comes_as_it_is_made(machine: Machine) -> None:
    heard: list[tuple[bytes, float]] = []
    machine.run(
        "echo 1; sleep 3; echo 2", hear=lambda _, data: heard.append((data, time.monotonic()))
    )
    assert [data for data, _ in heard] == [b"1\n", b"2\n"]
    assert heard[1][1] - heard[0][1] > 1


def test_who_does_not_wait_any_longer_ends_his_command(machine: Machine) -> None:
    with pytest.raises(BackendError, match="was not done within 2 s"):
        machine.run("echo begun; sleep 4321", timeout_s=2)
    machine.run("for i in $(seq 50); do pgrep -f 'sleep 432[1]' || exit 0; sleep 0.2; done; exit 1")


def test_only_who_knows_the_token_runs_commands(machine: Machine) -> None:
    order = {"token": "guessed", "argv": ["touch", "/root/intruder"], "env": {}, "cwd": "/"}
    with socket.create_connection(("127.0.0.1", machine.port), timeout=30) as sock:
        sock.sendall(json.dumps(order).encode() + b"\n")
        assert sock.recv(100) == b""
    assert machine.run("ls /root/intruder", check=False).code == 2


def test_it_reaches_nothing_outside(machine: Machine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        line = (
            f"timeout 5 bash -c ': < /dev/tcp/192.168.76.2/{port}'"  # this machine, seen from there
        )
        assert machine.run(line, check=False).code != 0


def test_the_checkout_is_there_and_may_not_be_changed(machine: Machine) -> None:
    assert machine.run("cat Makefile").out == (disks.ROOT / "Makefile").read_text()
    assert "Read-only" in machine.run("touch Makefile", check=False).err
    shown = machine.run("rdmalab image info --json", check=False)
    assert machine.run("python -c 'import rdmalab; print(rdmalab.__file__)'").out == (
        "/checkout/rdmalab/__init__.py\n"
    ), shown


def test_a_machine_that_ends_says_its_last_words_and_leaves_nothing() -> None:
    before = set(runtime_dir().iterdir())
    lost = r"has ended \((it hung up|Connection reset by peer)\)\n  .*Kernel panic"
    with started() as short_lived, pytest.raises(BackendError, match=lost):
        short_lived.run("echo c > /proc/sysrq-trigger; sleep 60")
    with pytest.raises(BackendError, match="has ended .Connection refused"):
        short_lived.run("true")
    assert set(runtime_dir().iterdir()) == before


def test_its_python_packages_are_those_of_the_project() -> None:
    names = {re.split("[<>=]", wanted)[0] for wanted in disks.requirements()}
    assert {"docker", "jupyter_client", "nbgrader", "pytest"} <= names
    assert not names & {"jupyterlab", "ruff", "mypy", "playwright"}
