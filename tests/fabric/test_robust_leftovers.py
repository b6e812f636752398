"""B65: what is left of labs, lies about them, or never was one. No foreign process is touched."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator

import pytest

from rdmalab import state

from .sandbox import Sandbox, sandbox

pytestmark = [pytest.mark.fabric, pytest.mark.long, pytest.mark.timeout(400)]


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A living process that is none of ours."""
    with subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL) as process:
        yield process
        process.kill()


def names(box: Sandbox, pid: int, started: float) -> None:
    """Let the lab's state file name a process."""
    file = box.lab() / "state.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "pid": pid, "started": started}))


@pytest.mark.parametrize("right_time", [False, True], ids=["wrong start time", "right start time"])
def test_b65_a_state_file_that_names_a_living_foreign_process(
    sleeper: subprocess.Popen[bytes], right_time: bool
) -> None:
    """B65: with the right start time too, as after a reboot that counted the same: not ours."""
    started = state.process_started(sleeper.pid)
    assert started is not None
    lie = (sleeper.pid, started if right_time else started - 1)
    with sandbox() as box:
        box.up()
        old = box.qemus()
        names(box, *lie)
        assert "default: not running" in box.run("status").out
        refused = box.run("exec", "alice", "--", "true")
        assert refused.code == 1 and "does not run" in refused.err
        box.up()
        assert len(box.qemus()) == 1 and box.qemus() != old, "the QEMU of the old one is ended"
        box.works()
        names(box, *lie)
        assert box.run("down", "--all").code == 0
        assert box.left() == [] and sleeper.poll() is None


def test_b65_down_needs_no_state_file() -> None:
    """B65: with it gone, with it garbled, with the whole folder gone."""
    with sandbox(name="ru n,1") as box:  # a comma and a blank, which QEMU's options could trip on
        box.up()
        (box.lab() / "state.json").unlink()
        assert json.loads(box.run("status", "--json").out) == {"labs": [], "leftovers": ["default"]}
        assert box.run("down", "--all").out == "Stopped: default.\n"
        assert box.left() == []

        box.up("--lab", "other")
        (box.lab("other") / "state.json").write_bytes(b"\0" * 100)
        assert box.run("down", "--lab", "other").out == "Stopped: other.\n"
        assert box.left() == []

        for leave in (box.lab("other"), box.runtime):
            box.up("--lab", "other")
            subprocess.run(["rm", "-rf", str(leave)], check=True, timeout=60)
            assert "other: not running" in box.run("status").out
            assert box.run("down", "--all").out == "Stopped: other.\n"
            assert box.left() == []


def test_b65_up_replaces_a_machine_whose_folder_is_gone() -> None:
    """B65: not a second one beside it."""
    with sandbox() as box:
        box.up()
        old = box.qemus()
        subprocess.run(["rm", "-rf", str(box.runtime)], check=True, timeout=60)
        box.up()
        assert len(box.qemus()) == 1 and box.qemus() != old
        box.works()


def test_b65_junk_in_the_run_time_folder() -> None:
    """B65: it is passed by, and there afterwards; what stands in a lab's place is replaced."""
    with sandbox() as box:
        labs = box.runtime / "labs"
        (labs / "default" / "state.json").mkdir(parents=True)
        (labs / "default" / "qmp.sock").write_text("no socket")
        junk = [labs / "UPPER", labs / ".hidden", labs / "a b", box.runtime / "core"]
        for path in junk:
            path.mkdir()
        (labs / "notes.txt").write_text("mine")
        (box.runtime / "default.lock").write_text("a lock that nobody holds")
        assert json.loads(box.run("status", "--json").out) == {"labs": [], "leftovers": ["default"]}
        box.up()
        box.works()
        assert box.run("down", "--all").out == "Stopped: default.\n"
        assert all(path.is_dir() for path in junk)
        assert (labs / "notes.txt").read_text() == "mine"
        subprocess.run(["rm", "-rf", str(box.runtime)], check=True, timeout=60)


def test_b39_a_process_that_holds_the_device_does_not_hold_up_down() -> None:
    """B39: with a registered MR in its hands; `down` is done in 20 s, and the next `up` works."""
    hold = (
        "import time\nfrom pyverbs.device import Context\nfrom pyverbs.pd import PD\n"
        "from pyverbs.mr import MR\nfrom rdmalab import here\n"
        "mr = MR(PD(Context(name=here.device)), 1 << 20, 1)\nprint('held', flush=True)\n"
        "time.sleep(600)"
    )
    with sandbox() as box:
        box.up()
        holder = box.start("exec", "alice", "--", "python3", "-c", hold)
        assert holder.until(lambda: "held" in holder.out.read_text())
        shown = box.run("exec", "--root", "alice", "--", "rdma", "resource", "show", "mr")
        assert "mrlen 1048576" in shown.out and "python3" in shown.out, shown
        assert box.run("down", deadline_s=20).out == "Stopped: default.\n"
        done = holder.wait(20)
        assert done.code == 1 and "has ended" in done.err
        assert box.left() == []
        box.up()
        box.works()
