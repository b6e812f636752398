"""What is known of labs: only what can be believed, however the run-time folder looks."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rdmalab import state
from rdmalab.errors import BackendError, UsageError

settings.register_profile("patient", deadline=None)  # a loaded machine may take its time
settings.load_profile("patient")

HOST = {"name": "alice", "ip": "10.0.0.1", "device": "rxe_alice", "gid": "::ffff:10.0.0.1"}
HOST |= {"gid_index": 1, "mtu": 4096, "mac": "02:00:00:00:00:01"}  # type: ignore[dict-item]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run-time folder of the test's own."""
    monkeypatch.setenv("RDMALAB_RUNTIME_DIR", str(tmp_path / "run"))
    return tmp_path / "run"


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A living process that is none of ours."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def lab_state(**changes: Any) -> state.LabState:
    """The state of a lab that this very process would be."""
    mine = state.process_started(os.getpid()) or 0.0
    facts = state.LabState(
        lab="default",
        backend="vm",
        accel="tcg",
        accel_why="a test",
        restored=True,
        ready_s=1.0,
        pid=os.getpid(),
        started=mine,
        hosts=[HOST],
        control={"port": 1, "curve": "secret"},
    )
    return replace(facts, **changes)


def written(**changes: Any) -> state.LabState:
    facts = lab_state(**changes)
    state.lab_folder(facts.lab).mkdir(parents=True, exist_ok=True)
    state.write(facts)
    return facts


# ---------------------------------------------------------------- the state file


def test_what_was_written_is_read() -> None:
    assert state.read("default") is None
    facts = written()
    assert state.read("default") == facts


def test_it_is_for_its_owner_only_and_replaced_at_once() -> None:
    """It holds keys: not for a moment may anybody else read it, nor see half of it."""
    os.umask(mask := os.umask(0))
    written()
    file = state.lab_folder("default") / "state.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    os.umask(0)
    try:
        written(ready_s=2.0)
    finally:
        os.umask(mask)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [entry.name for entry in file.parent.iterdir()] == ["state.json"]
    assert stat.S_IMODE(file.parent.parent.parent.stat().st_mode) == 0o700


def test_what_others_see_has_no_keys() -> None:
    shown = json.dumps(lab_state().public())
    assert "secret" not in shown and "curve" not in shown and "mac" not in shown


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.one_of(
        st.binary(max_size=60),
        st.recursive(
            st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5)),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=5), inner),
            max_leaves=5,
        ).map(lambda value: json.dumps(value).encode()),
    )
)
def test_any_bytes_are_no_lab(data: bytes) -> None:
    file = state.lab_folder("default") / "state.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    assert state.read("default") is None


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(["pid", "started", "hosts", "lab"]),
    st.one_of(st.none(), st.text(max_size=5), st.lists(st.integers(), min_size=1, max_size=2)),
)
def test_a_field_of_another_kind_is_no_lab(name: str, value: object) -> None:
    file = state.lab_folder("default") / "state.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({**asdict(lab_state()), name: value}))
    assert state.read("default") is None


def test_a_state_of_another_lab_is_not_this_ones() -> None:
    """As when a folder was copied."""
    written(lab="other")
    copy = state.lab_folder("default")
    copy.mkdir()
    (copy / "state.json").write_bytes((state.lab_folder("other") / "state.json").read_bytes())
    assert state.read("default") is None and state.read("other") is not None


# ---------------------------------------------------------------- processes


def test_a_lab_lives_while_its_process_does(sleeper: subprocess.Popen[bytes]) -> None:
    started = state.process_started(sleeper.pid)
    assert started is not None
    lab = lab_state(pid=sleeper.pid, started=started)
    assert lab.alive()
    sleeper.kill()
    deadline = time.monotonic() + 20
    while lab.alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not lab.alive(), "a process that nobody has collected yet is no living one"


def test_b65_a_pid_that_is_anothers_by_now_is_no_lab(sleeper: subprocess.Popen[bytes]) -> None:
    started = state.process_started(sleeper.pid)
    assert started is not None
    assert not lab_state(pid=sleeper.pid, started=started - 1).alive()


def test_a_process_with_a_strange_name_has_a_start() -> None:
    """In /proc/PID/stat the name stands in brackets, and may hold some itself."""
    code = "import ctypes; ctypes.CDLL(None).prctl(15, b') S 1 (', 0, 0, 0)  # PR_SET_NAME\n"
    code += "print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        mine = state.process_started(os.getpid())
        started = state.process_started(process.pid)
        process.kill()
    assert mine is not None and started is not None and started >= mine


def test_no_process_has_no_start() -> None:
    assert state.process_started(2**22 + 1) is None  # beyond the kernel's largest pid


# ---------------------------------------------------------------- the folder


def test_labs_are_folders_that_can_be_labs(folder: Path) -> None:
    """B65: what else lies there is neither shown nor touched."""
    assert state.lab_ids() == []
    for name in ("zoo", "default"):
        (folder / "labs" / name).mkdir(parents=True)
    for junk in (".hidden", "UPPER", "a b", "x" * 40, "core.1234"):
        (folder / "labs" / junk).mkdir()
    (folder / "labs" / "notes").write_text("a file")
    assert state.lab_ids() == ["default", "zoo"]


def test_a_lab_id_never_leaves_the_folder() -> None:
    for wrong in ("..", "../x", "/etc", ""):
        with pytest.raises(UsageError):
            state.lab_folder(wrong)


def test_a_folder_too_deep_for_sockets_is_said_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by QEMU, in words about UNIX_PATH_MAX."""
    monkeypatch.setenv("RDMALAB_RUNTIME_DIR", str(tmp_path / ("d" * 100)))
    with pytest.raises(BackendError, match="too long for a socket's path") as caught:
        state.lab_folder("default")
    assert "RDMALAB_RUNTIME_DIR" in caught.value.next_step


# ---------------------------------------------------------------- the lock


def silent(text: str) -> None:
    """Nobody listens."""


def test_the_locks_file_goes_with_it(folder: Path) -> None:
    with state.locked("default", silent):
        assert [entry.name for entry in folder.iterdir()] == ["default.lock"]
    assert list(folder.iterdir()) == []


def test_a_lock_holds_off_others_and_says_so() -> None:
    heard: list[str] = []
    with state.locked("default", silent):  # noqa: SIM117 - the order is the point
        with pytest.raises(BackendError, match="has held the lab 'default'") as caught:
            with state.locked("default", heard.append, deadline_s=1.5):
                raise AssertionError("two hold the lock")
    assert len(heard) == 1 and "waiting for it" in heard[0]
    assert "fuser" in caught.value.next_step
    with state.locked("default", silent, deadline_s=0), state.locked("other", silent, deadline_s=0):
        pass


def test_only_one_holds_the_lock_at_a_time(folder: Path) -> None:
    """Also while each takes the file away behind itself."""
    inside: list[int] = []
    most: list[int] = []

    def work(number: int) -> None:
        for _ in range(20):
            with state.locked("default", silent, deadline_s=60):
                inside.append(number)
                most.append(len(inside))
                time.sleep(0.0005)
                inside.remove(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert len(most) == 120 and max(most) == 1
    assert list(folder.iterdir()) == []


def test_a_killed_holder_holds_nothing() -> None:
    """B65: and the file that it left is taken over."""
    code = "import os; from rdmalab import state\n"
    code += "with state.locked('default', print): os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == -9
    with state.locked("default", silent, deadline_s=0):
        pass
