"""B57: the virtual machine goes away under somebody's hands: said at once, mended by `up`."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import rdmalab
from rdmalab import state
from rdmalab.errors import LabGone, RdmalabError

pytestmark = [pytest.mark.fabric, pytest.mark.long, pytest.mark.timeout(400)]

PATIENCE_S = 10.0  # promised are 5
NewLab = Callable[..., rdmalab.Lab]


@contextlib.contextmanager
def says_so_in_time(kill_at: list[float]) -> Iterator[None]:
    """What is inside raises LabGone, soon after the kill, and with what to do next."""
    with pytest.raises(LabGone) as caught:
        yield
    assert time.monotonic() - kill_at[0] < PATIENCE_S
    assert "has ended" in caught.value.what and "rdmalab.up()" in caught.value.next_step
    assert "\n" not in caught.value.what, "a killed machine has told no reason"


def kill_later(lab: rdmalab.Lab, delay_s: float) -> list[float]:
    """SIGKILL to the lab's QEMU after a while; when that was, once it has been."""
    when = [time.monotonic() + delay_s]

    def kill() -> None:
        when[0] = time.monotonic()
        os.kill(lab.state.pid, signal.SIGKILL)

    threading.Timer(delay_s, kill).start()
    return when


def test_b57_killed_while_a_cell_runs(new_lab: NewLab) -> None:
    """B57: the cell raises; `up` in the same process brings all back; the same cell passes."""
    lab = new_lab("alice", "bob")
    cell = "import time\nfor _ in range(n): time.sleep(0.1)\nprint('done')"
    lab.alice.put(n=600)
    job = lab.bob.start("import time; time.sleep(60)")
    with says_so_in_time(kill_later(lab, 1)):
        lab.alice.run(cell)
    with pytest.raises(LabGone):
        job.result(timeout_s=PATIENCE_S)
    assert not lab.alive() and "gone" in repr(lab)

    again = rdmalab.up(lab=lab.id)
    assert again is not lab and again.state.pid != lab.state.pid
    again.alice.put(n=3)
    again.alice.run(cell)
    again.bob.put(x=b"bytes")
    assert again.bob.get("x") == b"bytes"
    assert rdmalab.up(lab=lab.id) is again


def test_b57_a_panic_gives_its_reason(new_lab: NewLab) -> None:
    """B57: the guest's kernel gives up: the error has the console's reason, and a log is kept."""
    lab = new_lab("alice", "bob")
    with pytest.raises(LabGone) as caught:
        lab.remote.run("root", ["sh", "-c", "echo c > /proc/sysrq-trigger; sleep 30"])
    assert "sysrq" in caught.value.what.lower(), caught.value.what
    kept = Path(caught.value.what.rpartition("Its log is ")[2].rstrip("."))
    assert "Kernel panic" in kept.read_text() and str(lab.state.pid) in kept.name


def test_b57_killed_between_two_cells(new_lab: NewLab) -> None:
    """B57: whatever is called next says so; none of it waits, and the old object stays harmless."""
    lab = new_lab("alice", "bob")
    lab.alice.run("x = 1")
    os.kill(lab.state.pid, signal.SIGKILL)
    calls: list[Callable[[], object]] = [
        lambda: lab.alice.run("print(x)"),
        lambda: lab.alice.get("x"),
        lambda: lab.alice.put(x=2),
        lambda: lab.alice.interrupt(),
        lambda: lab.alice.restart(),
        lambda: lab.bob.start("1").result(timeout_s=PATIENCE_S),
        lambda: lab.fault("bob", loss="5%").__enter__(),
        lambda: lab.remote.run("exec", ["true"], host="bob"),
    ]
    for call in calls:
        with says_so_in_time([time.monotonic()]):
            call()
    again = rdmalab.up(lab=lab.id)
    with pytest.raises(RdmalabError):
        lab.alice.run("1")
    lab.close()
    again.alice.run("x = 1")
    assert again.alice.get("x") == 1


def test_b57_what_an_earlier_run_left_is_not_believed(new_lab: NewLab) -> None:
    """B57: its state file comes back, as from a back-up; the ports in it may be others' by now."""
    lab = new_lab("alice", "bob")
    file = state.lab_folder(lab.id) / "state.json"
    old = file.read_bytes()
    os.kill(lab.state.pid, signal.SIGKILL)
    lab.down()
    file.parent.mkdir()
    file.write_bytes(old)
    again = rdmalab.up(lab=lab.id)
    assert again.state.control["curve"] != lab.state.control["curve"]
    keys = [host["kernel"]["key"] for host in again.state.hosts + lab.state.hosts]
    assert len(set(keys)) == 4, "fresh secrets each time"
    again.alice.run("x = 1")


def test_b57_a_machine_that_hangs_is_given_up(new_lab: NewLab) -> None:
    """B57: QEMU lives and does nothing. A deadline holds all the same, and `down` ends it."""
    lab = new_lab("alice", "bob")
    lab.alice.run("1 + 1")
    os.kill(lab.state.pid, signal.SIGSTOP)
    begin = time.monotonic()
    with pytest.raises(RdmalabError):
        lab.alice.run("1 + 1", timeout_s=1)
    assert time.monotonic() - begin < 60
    lab.down()
    assert state.process_started(lab.state.pid) is None
    rdmalab.up(lab=lab.id).alice.run("1 + 1")
