"""Ending the right process, and no other; waits for QEMU that end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rdmalab import qmp
from rdmalab.errors import BackendError

LISTENER = """
import signal, socket, sys, time
if sys.argv[2] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
server = socket.socket(socket.AF_UNIX)
server.bind(sys.argv[1])
server.listen(1)
print("listens", flush=True)
time.sleep(300)
"""

# QEMU 7.2's answer to `info usernet`
USERNET = """Hub -1 (net):
  Protocol[State]    FD  Source Address  Port   Dest. Address  Port RecvQ SendQ
  TCP[HOST_FORWARD]  20       127.0.0.1 40117       10.0.2.15  7104     0     0
  TCP[HOST_FORWARD]  10       127.0.0.1 36553       10.0.2.15  7000     0     0
  TCP[ESTABLISHED]   31       127.0.0.1 36553       10.0.2.15  7000     0     0
  UDP[116 sec]       44       10.0.2.15   123         9.9.9.9    53     0     0
"""


@contextlib.contextmanager
def listener(
    path: Path, how: str = "polite", code: str = LISTENER
) -> Iterator[subprocess.Popen[str]]:
    """A process that listens on a socket, as QEMU does on its monitor's."""
    command = [sys.executable, "-c", code, str(path), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "listens\n"
            yield process
        finally:
            process.kill()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "qmp.sock"


# ---------------------------------------------------------------- who listens


def test_the_kernel_names_the_listener(path: Path) -> None:
    with listener(path) as process:
        assert qmp.listener_pid(path) == process.pid


def test_nobody_listens(path: Path) -> None:
    assert qmp.listener_pid(path) is None
    path.write_text("no socket")
    assert qmp.listener_pid(path) is None
    path.unlink()
    with listener(path) as process:
        process.kill()
        process.wait(20)
        assert path.exists(), "the socket's file outlives its process"
        assert qmp.listener_pid(path) is None


def test_a_path_too_long_for_a_socket(tmp_path: Path) -> None:
    assert qmp.listener_pid(tmp_path / ("x" * 200)) is None


# ---------------------------------------------------------------- the end


def test_the_listener_is_ended(path: Path) -> None:
    with listener(path) as process:
        assert qmp.end_qemu(path)
        assert process.wait(20) == -signal.SIGTERM
    assert not qmp.end_qemu(path)


def test_one_that_will_not_go_is_killed(path: Path) -> None:
    with listener(path, "stubborn") as process:
        assert qmp.end_process(process.pid, lambda pid: True, deadline_s=0.3)
        assert process.wait(20) == -signal.SIGKILL


def test_a_stopped_one_is_ended_too(path: Path) -> None:
    """As when somebody pressed Ctrl-Z, or a debugger holds it."""
    with listener(path) as process:
        process.send_signal(signal.SIGSTOP)
        assert qmp.end_process(process.pid, lambda pid: True, deadline_s=0.3)
        assert process.wait(20) in (-signal.SIGTERM, -signal.SIGKILL)  # both wait for it then


def test_b65_a_pid_that_is_anothers_by_now_is_left_alone(path: Path) -> None:
    """B65: between the look and the kill, the pid may have come to mean another process."""
    with listener(path) as process:
        assert not qmp.end_process(process.pid, lambda pid: False)
        time.sleep(0.2)
        assert process.poll() is None


def test_a_pid_that_nobody_has() -> None:
    assert not qmp.end_process(2**22 + 1, lambda pid: True)


# ---------------------------------------------------------------- the monitor


def test_no_monitor_is_an_error_with_a_next_step(path: Path) -> None:
    with pytest.raises(BackendError, match="monitor does not answer") as caught, qmp.monitor(path):
        raise AssertionError("nobody is there")
    assert "rdmalab down" in caught.value.next_step


def test_a_monitor_that_says_nothing_is_given_up(path: Path) -> None:
    silence = pytest.raises(BackendError, match="does not answer")
    with listener(path), silence, qmp.monitor(path, deadline_s=0.5):
        raise AssertionError("it says nothing")


def test_a_monitor_that_hangs_up(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen(1)
        threading.Thread(target=lambda: server.accept()[0].close(), daemon=True).start()
        with pytest.raises(BackendError, match="does not answer"), qmp.monitor(path, deadline_s=5):
            raise AssertionError("it hung up")


TALK = """
import json, socket, sys, time
server = socket.socket(socket.AF_UNIX)
server.bind(sys.argv[1])
server.listen(1)
print("listens", flush=True)
talk = server.accept()[0].makefile("rw")
def say(text):
    talk.write(text + "\\n")
    talk.flush()
say(json.dumps({"QMP": {"version": {}, "capabilities": []}}))
for line in talk:
    request = json.loads(line)
    say(json.dumps({"event": "RESUME", "data": {}}))
    if request["execute"] == "nonsense":
        say(json.dumps({"error": {"class": "CommandNotFound", "desc": "it has not been found"}}))
    elif request["execute"] == "garble":
        say("no json at all")
    else:
        say(json.dumps({"return": request["arguments"]}))
"""


def test_answers_refusals_and_events_are_told_apart(path: Path) -> None:
    """Events come in between at any time; an answer is what has "return" or "error" in it."""
    with listener(path, code=TALK), qmp.monitor(path) as monitor:
        assert monitor.cmd("query-status", **{"command-line": "x"}) == {"command-line": "x"}
        with pytest.raises(BackendError, match="refused nonsense: it has not been found"):
            monitor.cmd("nonsense")
        assert monitor.cmd("stop") == {}


def test_a_socket_that_is_bound_and_not_yet_listened_on_is_waited_for(path: Path) -> None:
    """Between the two, QEMU can lose the processor on a busy machine."""
    late = TALK.replace("server.listen(1)", 'print("listens", flush=True); time.sleep(0.3)')
    late = late.replace('print("listens", flush=True)\ntalk', "server.listen(1)\ntalk")
    with listener(path, code=late):
        assert qmp.listener_pid(path) is None
        with qmp.monitor(path) as monitor:
            assert monitor.cmd("stop") == {}


def test_what_is_no_qmp_is_an_error_too(path: Path) -> None:
    garbled = pytest.raises(BackendError, match="does not answer")
    with listener(path, code=TALK), garbled, qmp.monitor(path) as monitor:
        monitor.cmd("garble")


def test_the_monitor_can_be_used_inside_a_running_event_loop(path: Path) -> None:
    """As in every cell of a notebook: its kernel runs them on an asyncio loop."""

    async def cell() -> None:
        with qmp.monitor(path) as monitor:
            assert monitor.cmd("query-status") == {}

    with listener(path, code=TALK):
        asyncio.run(cell())


class Answers:
    """A monitor that answers each command from a list; the last answer stays."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.commands: list[tuple[str, dict[str, Any]]] = []

    def cmd(self, name: str, **arguments: Any) -> Any:
        self.commands.append((name, arguments))
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def test_forwarded_ports_are_read() -> None:
    assert qmp.forwards(Answers(USERNET)) == {7104: 40117, 7000: 36553}  # type: ignore[arg-type]
    assert qmp.forwards(Answers("")) == {}  # type: ignore[arg-type]


def test_a_migration_is_waited_for() -> None:
    monitor = Answers({}, {}, {"status": "setup"}, {"status": "active"}, {"status": "completed"})
    qmp.migrate_out(monitor, Path("/tmp/it's here, state"))  # type: ignore[arg-type]
    assert monitor.commands[0][1]["capabilities"] == qmp.IGNORE_SHARED
    assert monitor.commands[1][1]["uri"] == """exec:cat > '/tmp/it'"'"'s here, state'"""


def test_a_migration_that_fails_gives_its_reason() -> None:
    answer = {"status": "failed", "error-desc": "No space left on device"}
    with pytest.raises(BackendError, match="No space left on device"):
        qmp.wait_migration(Answers(answer), 5)  # type: ignore[arg-type]


def test_a_migration_that_never_ends_is_given_up() -> None:
    with pytest.raises(BackendError, match="migration active"):
        qmp.wait_migration(Answers({"status": "active"}), 0.1)  # type: ignore[arg-type]
