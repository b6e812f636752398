"""Nobody else on the machine gets in, and no two starts share a secret."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
from jupyter_client import BlockingKernelClient

import rdmalab
from rdmalab import notebook

pytestmark = [pytest.mark.fabric, pytest.mark.timeout(300)]

STRANGER = 4242  # a uid that is nobody's here
CANARY = "canary-7f3a"
LISTEN_S = 6.0


def attack(ports: dict[str, int], pipe: int) -> None:
    """As a stranger without the Curve key: listen to the output, ask the kernel to run code."""
    context = zmq.Context()
    output = context.socket(zmq.SUB)
    output.subscribe(b"")
    output.connect(f"tcp://127.0.0.1:{ports['iopub']}")
    shell = context.socket(zmq.DEALER)
    shell.connect(f"tcp://127.0.0.1:{ports['shell']}")
    header = {"msg_id": "1", "msg_type": "execute_request", "session": "s", "version": "5.3"}
    code = {"code": "open('/tmp/owned', 'w').close()", "silent": False}
    parts = [json.dumps(part).encode() for part in (header, {}, {}, code)]
    shell.send_multipart([b"<IDS|MSG>", b"", *parts])
    poller = zmq.Poller()
    poller.register(output, zmq.POLLIN)
    poller.register(shell, zmq.POLLIN)
    os.write(pipe, b"listening ")
    end = time.monotonic() + LISTEN_S
    got = 0
    while time.monotonic() < end:
        got += len(poller.poll(200))
    os.write(pipe, b"got %d" % got)


def as_stranger(action: Callable[..., None], *args: object) -> tuple[int, int]:
    """Run a function as another local user in a fork: its pid, and a pipe with what it writes."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setresgid(STRANGER, STRANGER, STRANGER)
            os.setresuid(STRANGER, STRANGER, STRANGER)
            action(*args, write)
        except BaseException as error:
            os.write(write, repr(error).encode())
        os._exit(0)
    os.close(write)
    return pid, read


def end_of(pid: int, pipe: int) -> str:
    """Wait for a stranger's end and return the rest of what it wrote."""
    with os.fdopen(pipe, "rb") as rest:
        said = rest.read().decode()
    os.waitpid(pid, 0)
    return said


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user here")
def test_another_user_can_neither_run_nor_read(lab: rdmalab.Lab) -> None:
    """The ports are on loopback for all to see; without the key they are of no use."""
    kernel = next(host["kernel"] for host in lab.state.hosts if host["name"] == "alice")
    pid, pipe = as_stranger(attack, kernel["ports"])
    assert os.read(pipe, 10) == b"listening "
    for _ in range(10):
        lab.alice.run(f"print('{CANARY}')")
        time.sleep(0.2)
    assert end_of(pid, pipe) == "got 0"
    lab.alice.run("import os; owned = os.path.exists('/tmp/owned')")
    assert lab.alice.get("owned") is False


def test_the_owner_hears_what_the_stranger_does_not(
    lab: rdmalab.Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    """The test above would notice: with the key, the same ports say everything."""
    lab.alice.run(f"print('{CANARY}')")
    assert CANARY in capsys.readouterr().out


@pytest.fixture
def notebook_kernel(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """The connection file of a kernel that JupyterLab, as `rdmalab lab` starts it, has started."""
    env = {**os.environ, "JUPYTER_RUNTIME_DIR": str(tmp_path), "RDMALAB_LABS": str(tmp_path)}
    command = notebook.server_command(browser=False, ip="127.0.0.1", port=0)
    with subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL) as server:
        try:
            at = json.loads(appeared(tmp_path, "jpserver-*.json"))
            address = f"{at['url']}api/kernels?token={at['token']}"
            with urllib.request.urlopen(address, data=b"{}", timeout=60) as answer:
                ident = json.load(answer)["id"]
            yield json.loads((tmp_path / f"kernel-{ident}.json").read_text())
        finally:
            server.terminate()


def appeared(folder: Path, pattern: str, deadline_s: float = 60) -> str:
    """The text of the one file of this pattern, as soon as there is one."""
    end = time.monotonic() + deadline_s
    while True:
        for file in folder.glob(pattern):
            if text := file.read_text():
                return text
        assert time.monotonic() < end, f"no {pattern} within {deadline_s} s"
        time.sleep(0.1)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user here")
def test_another_user_hears_nothing_of_a_notebook(notebook_kernel: dict[str, Any]) -> None:
    """What cells print on hosts goes through the notebook's own kernel as well."""
    ports = {name: notebook_kernel[f"{name}_port"] for name in ("iopub", "shell")}
    pid, pipe = as_stranger(attack, ports)
    assert os.read(pipe, 10) == b"listening "
    client = BlockingKernelClient()
    client.load_connection_info(notebook_kernel)
    client.start_channels()
    client.wait_for_ready(timeout=60)
    heard = []
    for _ in range(10):
        client.execute_interactive(
            f"print('{CANARY}')", output_hook=lambda message: heard.append(message["msg_type"])
        )
        time.sleep(0.2)
    client.stop_channels()
    assert end_of(pid, pipe) == "got 0"
    assert heard.count("stream") == 10, "with the key, the same ports say everything"


def read_file(name: str, pipe: int) -> None:
    """As a stranger: read a file."""
    os.write(pipe, Path(name).read_bytes())


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user here")
def test_another_user_reads_no_key(lab: rdmalab.Lab) -> None:
    """The folder with keys and sockets is closed."""
    folder = Path(os.environ["RDMALAB_RUNTIME_DIR"]) / "labs" / lab.id
    assert (folder / "state.json").exists()
    assert "PermissionError" in end_of(*as_stranger(read_file, str(folder / "state.json")))


def test_nothing_listens_beyond_loopback(lab: rdmalab.Lab) -> None:
    """Every TCP socket that QEMU listens on is on 127.0.0.1, and it has some."""
    process = psutil.Process(lab.state.pid)
    listening = [c for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert listening
    assert {connection.laddr.ip for connection in listening} == {"127.0.0.1"}


def pester(ports: list[int], pipe: int) -> None:
    """As a stranger: junk, half a greeting, a plain and a wrongly keyed client on every port."""
    context, answers = zmq.Context(), 0
    for port in ports:
        for junk in (
            os.urandom(100_000),
            b"GET / HTTP/1.1\r\n\r\n",
            b"\xff" + bytes(8) + b"\x7f\x03",
        ):
            with socket.socket() as sock, contextlib.suppress(OSError):
                sock.settimeout(20)
                sock.connect(("127.0.0.1", port))
                sock.sendall(junk)
        for keyed in (False, True):
            client = context.socket(zmq.DEALER)
            client.linger = 0
            if keyed:
                client.curve_publickey, client.curve_secretkey = zmq.curve_keypair()
                client.curve_serverkey = zmq.curve_keypair()[0]
            client.connect(f"tcp://127.0.0.1:{port}")
            client.send_multipart([b'{"id": 1, "op": "root", "argv": ["touch", "/tmp/owned"]}'])
            answers += client.poll(300)
    os.write(pipe, b"answers: %d" % answers)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user here")
def test_another_user_can_neither_command_nor_disturb_the_guest(
    lab: rdmalab.Lab, guest: Callable
) -> None:
    """All of QEMU's ports, the control service's included: no answer, and nothing breaks."""
    process = psutil.Process(lab.state.pid)
    listening = [c for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    ports = [connection.laddr.port for connection in listening]
    assert lab.state.control["port"] in ports and len(ports) == 11
    lab.bob.run("kept = 11")
    assert end_of(*as_stranger(pester, ports)) == "answers: 0"
    assert guest(lab, "ls /tmp/owned").code != 0
    assert lab.bob.get("kept") == 11
    lab.alice.run("x = 1")


def secrets_of(lab: rdmalab.Lab) -> list[str]:
    """What should never be the same in two starts from one snapshot."""
    code = "import os, random, uuid, numpy\n"
    code += "drawn = [random.random(), float(numpy.random.rand()), os.urandom(16).hex(),"
    code += " uuid.uuid4().hex, open('/proc/sys/kernel/random/uuid').read()]"
    drawn = []
    for host in lab.hosts:
        host.run(code)
        drawn += [str(value) for value in host.get("drawn")]
    keys = [host["kernel"][key] for host in lab.state.hosts for key in ("key", "curve")]
    return [*drawn, *keys, lab.state.control["curve"]]


def test_two_starts_share_no_secret_and_the_clock_is_right(
    new_lab: Callable[..., rdmalab.Lab],
) -> None:
    """Random numbers, keys and identities are fresh after each restore of the same memory."""
    labs = [new_lab("alice", "bob") for _ in range(2)]
    assert all(lab.state.restored for lab in labs[1:])
    for lab in labs:
        begin = time.time()
        lab.alice.run("import time; now = time.time()")
        assert begin - 2 < lab.alice.get("now") < time.time() + 2
    first, second = map(secrets_of, labs)
    assert len(set(first)) == len(first)
    assert not set(first) & set(second)
