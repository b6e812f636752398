"""``rdmalab lab``: taken ports, and a JupyterLab that is killed. B61: no QEMU is left or lost."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator

import psutil
import pytest

from .sandbox import Command, Sandbox, private_cache, sandbox

pytestmark = [pytest.mark.fabric, pytest.mark.timeout(400)]

ADDRESS = re.compile(r"http://127\.0\.0\.1:(\d+)/lab\?token=([0-9a-f]+)")
WANTED = [*range(7000, 7130), 8888, 8889, 8890]  # the guest's own numbers, and JupyterLab's


@contextlib.contextmanager
def taken(ports: list[int]) -> Iterator[None]:
    """Listen on these ports of 127.0.0.1; one that somebody else has is taken as well."""
    with contextlib.ExitStack() as stack:
        for port in ports:
            sock = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                sock.bind(("127.0.0.1", port))
                sock.listen()
        yield


def address(server: Command) -> tuple[int, str]:
    """The port and token that JupyterLab prints."""
    assert server.until(lambda: ADDRESS.search(server.err()) is not None), server.err()
    found = ADDRESS.search(server.err())
    assert found is not None
    return int(found[1]), found[2]


def answers(port: int, token: str) -> bool:
    """Whether JupyterLab answers there."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/api/status?token={token}")
    with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=5) as reply:
        return "kernels" in json.load(reply)
    return False


def wait_for(condition: Callable[[], bool], deadline_s: float = 60) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"not within {deadline_s} s"
        time.sleep(0.05)


def listening(pids: list[int]) -> set[str]:
    """The addresses on which processes listen."""
    found = set()
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            for connection in psutil.Process(pid).net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN or connection.type == socket.SOCK_DGRAM:
                    found.add(connection.laddr.ip)
    return found


def servers(box: Sandbox) -> list[int]:
    """The pids of JupyterLab and what belongs to it."""
    return [pid for pid, line in box.processes().items() if "jupyterlab" in line]


def hosts_run(box: Sandbox, server: Command) -> None:
    """The hosts have come up beside the server."""
    assert server.until(lambda: "is up after" in server.err()), server.err()
    shown = json.loads(box.run("status", "--json").out)
    assert [lab["lab"] for lab in shown["labs"]] == ["default"]


def test_b61_jupyterlab_is_killed_with_all_ports_taken() -> None:
    """B61: three ways in which it ends; each time the hosts are adopted and not doubled."""
    with taken(WANTED), sandbox() as box:
        box.env |= {"HOME": str(box.home), "RDMALAB_LABS": str(box.home)}
        qemus = set()

        server = box.start("lab", "--no-browser")
        port, token = address(server)
        assert port not in WANTED
        wait_for(lambda: answers(port, token))
        hosts_run(box, server)
        qemus |= set(box.qemus())
        assert listening(list(box.processes())) == {"127.0.0.1"}, "nothing but loopback"
        assert server.end(signal.SIGKILL).code == -signal.SIGKILL
        wait_for(lambda: servers(box) == [])  # it was asked to end when its parent was gone

        server = box.start("lab", "--no-browser")
        wait_for(lambda: answers(*address(server)))
        hosts_run(box, server)
        (pid,) = servers(box)
        psutil.Process(pid).kill()
        done = server.wait(60)
        assert done.code == 1 and "JupyterLab ended with exit code -9" in done.err
        qemus |= set(box.qemus())

        server = box.start("lab", "--no-browser")
        wait_for(lambda: answers(*address(server)))
        hosts_run(box, server)
        qemus |= set(box.qemus())
        done = server.end(signal.SIGTERM)
        assert "Traceback" not in done.err and servers(box) == []

        assert len(qemus) == 1, "one lab, one machine, from the first to the last"
        box.works()
        assert box.run("down").out == "Stopped: default.\n"
        assert box.left() == []


def test_ctrl_c_while_the_hosts_of_jupyterlab_are_starting() -> None:
    """Both end, and nothing of either is left. There is no HOME to write to, for once."""
    with private_cache("alice", "bob") as cache, sandbox(cache) as box:
        box.env |= {"HOME": "/proc/no-home", "RDMALAB_LABS": str(box.home)}
        server = box.start("lab", "--no-browser")
        assert server.until(lambda: (box.lab() / "qmp.sock").exists())
        done = server.end(signal.SIGINT)
        assert "Traceback" not in done.err
        assert servers(box) == []
        if not json.loads(box.run("status", "--json").out)["labs"]:
            assert box.left() == []
