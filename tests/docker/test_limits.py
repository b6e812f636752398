"""B69: a memory limit is refused with figures, met with room, and named when it has struck."""

from __future__ import annotations

import json
import re

import pytest

from .engine import Engine

pytestmark = [pytest.mark.docker, pytest.mark.long, pytest.mark.timeout(1800)]

LOCKED = ("--read-only", "--cap-drop", "ALL", "--network", "none", "--tmpfs", "/tmp")
LOCKED += ("--security-opt", "no-new-privileges", "--volume", "/cache")
MIB = 1 << 20
# What the container has used at most: cgroup v2's file, or v1's.
PEAK = "cd /sys/fs/cgroup; cat memory.peak memory/memory.max_usage_in_bytes 2>/dev/null"
# The kernel ends the process that weighs most; QEMU volunteers. Memory
# is taken in steps until it is gone, but never as much as would end this process, too.
STRIKE = """
from pathlib import Path
import rdmalab

lab = rdmalab.up()
Path("/proc", str(lab.state.pid), "oom_score_adj").write_text("1000")
taken = []
while lab.alive() and len(taken) < 15:
    taken.append(bytearray(b"x") * (50 << 20))
try:
    lab.alice.run("pass")
except rdmalab.LabGone as error:
    print(error)
"""


def run(engine: Engine, image: str, *limits: str, command: tuple[str, ...], code: int = 0) -> str:
    """Run a command in a container with these limits, to this exit code; all that it said."""
    words = ["run", "--rm", "--label", engine.label, *LOCKED, *limits, image, *command]
    done = engine.ask(*words, deadline_s=400)
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_b69_too_small_a_container_refuses_with_figures(engine: Engine, image: str) -> None:
    said = run(engine, image, "--memory", "300m", command=("rdmalab", "up"), code=1)
    assert re.search(r"need 700 MiB of memory, and \d+ MiB are free of the 300 MiB", said), said
    assert "of the 300 MiB that its control group may have" in said
    assert "--memory" in said


def test_b69_a_small_container_has_room_for_a_whole_rehearsal(engine: Engine, image: str) -> None:
    """1 GiB and one processor: small hosts, from the saved start; all of a lab's basics pass.

    The peak is below the limit.
    """
    limits = ("--memory", "1g", "--memory-swap", "1g", "--cpus", "1")
    with engine.container(*LOCKED, *limits, "--entrypoint", "sleep", image, "900") as name:
        started = ["sh", "-c", 'exec /opt/rdmalab/bin/start "$@"', "sh", "rdmalab"]
        said = engine("exec", name, *started, "up", "--json", deadline_s=300)
        state = json.loads(said[said.index("{") :])
        assert state["restored"], state
        assert engine("exec", name, "rdmalab", "exec", "alice", "--", "nproc") == "1"
        said = engine("exec", name, *started, "selftest", "--json", deadline_s=400)
        card = json.loads(said[said.index("{") :])
        assert card["passed"], card
        peak = int(engine("exec", name, "sh", "-c", f"{PEAK}; true").split()[0])
        assert peak < 1024 * MIB
        assert engine.ask("exec", name, "rdmalab", "status").returncode == 0


def test_b69_hosts_that_the_limit_has_ended_say_so(engine: Engine, image: str) -> None:
    limits = ("--memory", "900m", "--memory-swap", "900m")
    said = run(engine, image, *limits, command=("python3", "-c", STRIKE))
    assert "is gone: its virtual machine" in said, said
    assert "because the memory limit of 900 MiB was reached" in said
    assert "rdmalab.up()" in said
