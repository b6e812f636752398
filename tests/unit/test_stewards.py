"""The processes of a lab on this machine's own kernel: real ones, without any RDMA.

The hosts' side is laid into a folder as a start does it, and run from there.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from rdmalab import lab, stewards
from rdmalab.errors import BackendError
from rdmalab.remote import url
from rdmalab.topology import DESK, plan

HOSTS = plan(["alice"])
DEADLINE_S = 20.0


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """The hosts' side, as a start lays it."""
    stewards.lay(tmp_path, HOSTS)
    return tmp_path / stewards.CODE


def until(reached: Callable[[], object], what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not reached():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def test_what_containers_read_is_readable_whatever_the_owners_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        stewards.lay(tmp_path, HOSTS)
    finally:
        os.umask(before)
    code = tmp_path / stewards.CODE
    assert (code / "rdmalab" / "lodger.py").stat().st_mode & 0o777 == 0o644
    assert {place.stat().st_mode & 0o777 for place in (code, code / "rdmalab")} == {0o755}


def test_a_submission_is_graded_in_a_guest_only() -> None:
    with pytest.raises(BackendError, match="vm backend"):
        stewards.no_desk([*HOSTS, DESK], "docker")


# ---------------------------------------------------------------- the steward


@pytest.fixture
def lab_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("RDMALAB_RUNTIME_DIR", str(tmp_path / "r"))
    yield "one"
    stewards.stop("one")


def test_a_steward_is_known_by_its_mark_and_ends_with_a_start_that_breaks_off(lab_id: str) -> None:
    with stewards.launched(stewards.plan(lab_id, HOSTS, [1]), HOSTS) as steward:
        steward.expect("listening", lambda _: None)
        assert stewards.marked() == {steward.pid: lab_id} and lab.known() == [lab_id]
        assert (Path(os.environ["RDMALAB_RUNTIME_DIR"]) / "labs/one/h0/call").is_socket()
    steward.sock.close()
    os.kill(steward.pid, signal.SIGTERM)
    until(lambda: not stewards.marked(), "it goes on")
    assert stewards.stop(lab_id) and lab.known() == []


def test_down_ends_a_steward_whose_folder_is_gone(lab_id: str) -> None:
    import shutil

    with stewards.launched(stewards.plan(lab_id, HOSTS, [1]), HOSTS) as steward:
        steward.expect("listening", lambda _: None)
        shutil.rmtree(Path(os.environ["RDMALAB_RUNTIME_DIR"]) / "labs/one")
        assert lab.known() == [lab_id]
        assert stewards.stop(lab_id)
    assert not stewards.marked() and not stewards.stop(lab_id)


# ---------------------------------------------------------------- a keeper


@pytest.fixture
def keeper(tmp_path: Path, code: Path) -> Iterator[tuple[Path, socket.socket]]:
    """A keeper of this process's own network, and the steward's end of its call."""
    folder = tmp_path / "n0"
    folder.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as call:
        call.bind(str(folder / "call"))
        call.listen()
        call.settimeout(DEADLINE_S)
        process = subprocess.Popen(keeper_line(folder, "keep"), env=environment(code), cwd="/")
        steward, _ = call.accept()
        assert steward.recv(64) == b'{"pid": %d}' % process.pid
    yield folder, steward
    steward.close()
    assert process.wait(DEADLINE_S) == 0, "a keeper ends when the steward does"


def keeper_line(folder: Path, what: str, *argv: str) -> list[str]:
    return [sys.executable, "-m", "rdmalab.keeper", what, str(folder), *argv]


def environment(code: Path) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "PYTHONPATH": str(code)}


def test_a_keepers_command_has_our_streams_and_gives_its_exit_code(
    keeper: tuple[Path, socket.socket], code: Path
) -> None:
    script = "cat; echo said >&2; exit 7"
    done = subprocess.run(
        keeper_line(keeper[0], "run", "sh", "-c", script),
        env=environment(code),
        cwd="/",
        input="given",
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (7, "given", "said\n")
    gone = subprocess.run(
        keeper_line(keeper[0], "run", "no-such-program"),
        env=environment(code),
        cwd="/",
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert gone.returncode == 127 and "no-such-program" in gone.stderr


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_a_keepers_command_ends_with_its_caller(
    keeper: tuple[Path, socket.socket], code: Path, tmp_path: Path, end: signal.Signals
) -> None:
    """SIGINT is handed on; of SIGKILL the keeper hears by the connection."""
    line = keeper_line(keeper[0], "run", "sh", "-c", "echo $$; exec sleep 60")
    with subprocess.Popen(
        line, env=environment(code), cwd="/", stdout=subprocess.PIPE, text=True
    ) as caller:
        assert caller.stdout is not None
        pid = int(caller.stdout.readline())
        os.kill(caller.pid, end)
        assert caller.wait(DEADLINE_S) in (128 + end, -end)
    until(lambda: not running(pid), "the command goes on")


def running(pid: int) -> bool:
    try:
        return b"\nState:\tZ" not in Path(f"/proc/{pid}/status").read_bytes()
    except OSError:
        return False


# ---------------------------------------------------------------- a host's processes

FAMILY = """
import os, signal, subprocess, sys, time
from rdmalab.lodging import Lodging, libc
from rdmalab.network import HostSpec

libc.prctl(36, 1, 0, 0, 0)  # what set_up does: orphans come to this process
spec = HostSpec("alice", "10.0.0.1", "", "rxe0", 1500, 160, 256)
house = Lodging(spec, os.getcwd(), 1, False)

def start(code):
    child = os.fork()
    if child == 0:
        house.lower_rights("kernel")
        exec(code)
        os._exit(0)
    return child

away = "subprocess.Popen(['sleep', '60'], start_new_session=True)"
kernel = start(f"subprocess.Popen(['sleep', '60']); {away}; time.sleep(60)")
command = start("subprocess.Popen(['sleep', '60']); time.sleep(60)")
while len(house.members(".", ())) < 5:
    time.sleep(0.01)
os.kill(kernel, 9)
os.waitpid(kernel, 0)
house.kill("kernel", {command})
while not house.empty("kernel", {command}):
    time.sleep(0.01)
print("left of the command:", len(house.members(".", ())))
house.kill(".", ())
while not house.empty(".", ()):
    time.sleep(0.01)
print("left:", len(house.members(".", ())))
"""


def test_a_hosts_processes_are_ended_the_kernels_without_the_commands_and_then_all(
    code: Path, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAMILY],
        env=environment(code),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.splitlines() == ["left of the command: 2", "left: 0"], done.stderr


# ---------------------------------------------------------------- sockets

DOOR = """
import sys, zmq
from pathlib import Path
from rdmalab import doorway
public, secret = zmq.curve_keypair()
router = zmq.Context.instance().socket(zmq.ROUTER)
doorway.bind(router, doorway.listen_at(Path(sys.argv[1])).detach(), public, secret)
print(public.decode(), flush=True)
router.send_multipart([router.recv_multipart()[0], b"heard"])
router.close(linger=1000)
zmq.Context.instance().term()
"""


def test_a_door_in_a_folder_answers_who_knows_its_key(code: Path, tmp_path: Path) -> None:
    way = {"transport": "ipc", "ip": str(tmp_path / "c"), "port": 1}
    line = [sys.executable, "-c", DOOR, str(tmp_path / "c-1")]
    with (
        subprocess.Popen(line, env=environment(code), cwd="/", stdout=subprocess.PIPE) as server,
        zmq.Context() as context,
    ):
        assert server.stdout is not None
        public = server.stdout.readline().strip()
        for key, answer in ((zmq.curve_keypair()[0], 0), (public, zmq.POLLIN)):
            with context.socket(zmq.DEALER) as client:
                client.setsockopt(zmq.LINGER, 0)
                client.curve_publickey, client.curve_secretkey = zmq.curve_keypair()
                client.curve_serverkey = key
                client.connect(url(way))
                client.send(b"hello")
                assert client.poll(500 if not answer else 10_000) == answer
        assert server.wait(DEADLINE_S) == 0
