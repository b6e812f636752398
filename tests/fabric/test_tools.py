"""``rdmalab exec`` as a user has it, and the tools that RDMA people trust, run through it.

perftest, rping and ``rdma resource`` are the independent witnesses that these hosts do real RDMA.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import rdmalab

pytestmark = [pytest.mark.fabric, pytest.mark.timeout(300)]

RDMALAB = str(Path(sys.executable).with_name("rdmalab"))
PATIENCE_S = 90

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start(shared_lab: rdmalab.Lab) -> Iterator[Start]:
    """Start ``rdmalab exec`` with these words; whatever still runs at the end is ended."""
    begun: list[subprocess.Popen[bytes]] = []

    def run(*words: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [RDMALAB, "exec", *words],
            env=os.environ | {"RDMALAB_LAB": shared_lab.id},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        begun.append(process)
        return process

    yield run
    for process in begun:
        if process.poll() is None:
            process.kill()
        process.communicate()


def finish(process: subprocess.Popen[bytes]) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out.decode(), err.decode()


def wait_until(what: Callable[[], bool]) -> None:
    """Ask until it is so."""
    end = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < end, "still not so"
        time.sleep(0.05)


# ---------------------------------------------------------------- rdmalab exec


def test_streams_and_exit_code_are_the_commands_own(start: Start) -> None:
    script = "echo out; echo err >&2; exit 7"
    assert finish(start("alice", "--", "sh", "-c", script)) == (7, "out\n", "err\n")
    assert finish(start("bob", "--", "hostname")) == (0, "bob\n", "")
    assert finish(start("bob", "hostname")) == (0, "bob\n", "")


def test_words_arrive_as_they_are(start: Start) -> None:
    words = ["a b", "", "--help", "-x", "$HOME", "*", "'\"", "ü"]
    done = finish(start("alice", "--", "python3", "-c", "import sys; print(sys.argv[1:])", *words))
    assert done == (0, f"{words}\n", "")


def test_a_command_that_is_not_there(start: Start) -> None:
    code, out, err = finish(start("alice", "--", "nosuchcommand"))
    assert (code, out) == (127, "") and "nosuchcommand: no such command on alice" in err


def test_a_command_that_may_not_run(start: Start) -> None:
    code, _, err = finish(start("alice", "--", "/etc/hosts"))
    assert code == 126 and "ermission" in err


def test_a_host_that_is_not_there(start: Start) -> None:
    code, out, err = finish(start("mallory", "--", "true"))
    assert (code, out) == (2, "") and "no host 'mallory'; it has alice, bob" in err
    assert "Traceback" not in err


def test_a_lab_that_does_not_run(start: Start) -> None:
    code, _, err = finish(start("--lab", "nowhere", "alice", "--", "true"))
    assert code == 1 and "rdmalab up" in err and "Traceback" not in err


def test_a_command_ended_by_a_signal(start: Start) -> None:
    """As a shell says it: 128 and the signal's number."""
    assert finish(start("alice", "--", "sh", "-c", "kill -9 $$"))[0] == 137


def test_output_is_seen_before_the_command_ends(
    start: Start, shared_lab: rdmalab.Lab, sh: Callable
) -> None:
    process = start(
        "alice", "--", "sh", "-c", "echo one; until [ -e /tmp/end ]; do sleep 0.05; done"
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"one\n" and process.poll() is None
    sh(shared_lab, "alice", "touch /tmp/end")
    assert finish(process)[0] == 0
    sh(shared_lab, "alice", "rm /tmp/end")


def test_ten_megabytes_arrive_byte_for_byte(start: Start, tmp_path: Path) -> None:
    script = "import random, sys; sys.stdout.buffer.write(random.Random(5).randbytes(10_000_000))"
    process = start("alice", "--", "python3", "-c", script)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0 and err == b""
    expected = random.Random(5).randbytes(10_000_000)
    assert hashlib.sha256(out).digest() == hashlib.sha256(expected).digest()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ending_the_command_line_ends_the_command(
    start: Start, shared_lab: rdmalab.Lab, sh: Callable, signum: signal.Signals
) -> None:
    """Ctrl-C, a closed terminal, a supervisor: the remote command, children included, is gone."""
    process = start("alice", "--", "sh", "-c", "sleep 4323 & echo begun; sleep 4323")
    assert process.stdout is not None and process.stdout.readline() == b"begun\n"
    process.send_signal(signum)
    code, _, err = finish(process)
    assert code == 130 and "Traceback" not in err
    assert "sleep 4323" not in sh(shared_lab, "alice", "ps ax -o args | grep '[s]leep'").out


def test_a_command_that_ignores_ctrl_c_is_killed(
    start: Start, shared_lab: rdmalab.Lab, sh: Callable
) -> None:
    process = start(
        "alice", "--", "sh", "-c", "trap '' INT; echo begun; while :; do sleep 0.1; done"
    )
    assert process.stdout is not None and process.stdout.readline() == b"begun\n"
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 130
    assert "trap" not in sh(shared_lab, "alice", "ps ax -o args | grep '[t]rap'").out


def test_a_reader_that_goes_away_ends_the_command(
    start: Start, shared_lab: rdmalab.Lab, sh: Callable
) -> None:
    """``rdmalab exec alice -- yes | head -1``: no ``yes`` stays behind."""
    process = start("alice", "--", "yes")
    assert process.stdout is not None and process.stdout.readline() == b"y\n"
    process.stdout.close()
    assert process.wait(PATIENCE_S) == 1
    assert b"Traceback" not in process.stderr.read()  # type: ignore[union-attr]
    assert sh(shared_lab, "alice", "pgrep -x yes").code == 1


def test_a_killed_command_line_leaves_no_command(
    start: Start, shared_lab: rdmalab.Lab, sh: Callable
) -> None:
    """SIGKILL leaves us no chance to clean up: the guest notices that nobody listens any more."""
    process = start("alice", "--", "sleep", "4324")
    wait_until(lambda: sh(shared_lab, "alice", "pgrep -f 'sleep [4]324'").code == 0)
    process.kill()
    process.wait()
    wait_until(lambda: sh(shared_lab, "alice", "pgrep -f 'sleep [4]324'").code == 1)


def test_a_child_in_the_background_does_not_hold_the_command(
    start: Start, shared_lab: rdmalab.Lab, sh: Callable
) -> None:
    code, out, _ = finish(start("alice", "--", "sh", "-c", "sleep 4325 & echo done"))
    assert (code, out) == (0, "done\n")
    sh(shared_lab, "alice", "pkill sleep")


def test_many_commands_at_once(start: Start) -> None:
    processes = [start(("alice", "bob")[i % 2], "--", "sh", "-c", f"echo {i}") for i in range(4)]
    assert [finish(process)[:2] for process in processes] == [(0, f"{i}\n") for i in range(4)]


def test_the_hosts_administrator_may_configure_the_network_and_nothing_else(start: Start) -> None:
    assert finish(start("--root", "alice", "--", "ip", "link", "add", "type", "dummy"))[0] == 0
    assert finish(start("--root", "alice", "--", "ip", "link", "del", "dummy0"))[0] == 0
    assert finish(start("alice", "--", "ip", "link", "add", "type", "dummy"))[0] != 0
    assert finish(start("--root", "alice", "--", "mount", "-t", "tmpfs", "x", "/mnt"))[0] != 0


# ---------------------------------------------------------------- perftest, rping, rdma


def listening(lab: rdmalab.Lab, sh: Callable, host: str, port: int) -> None:
    """Wait until a server on a host listens."""
    wait_until(lambda: f":{port} " in sh(lab, host, "ss -Hltn").out)


def between(
    lab: rdmalab.Lab, sh: Callable, start: Start, server: str, client: str, tool: str
) -> str:
    """Run a perftest tool between two hosts; what its client says.

    On a busy machine it may be unable to time a cycle of the processor, and is run again.
    """
    device = {host.name: ["-d", host.device, "-x", str(host.gid_index)] for host in lab.hosts}
    for port in range(18515, 18525):
        words = [*tool.split(), "-p", str(port)]
        waiting = start(server, "--", *words, *device[server])
        listening(lab, sh, server, port)
        code, out, err = finish(start(client, "--", *words, *device[client], lab[server].ip))
        assert code == 0, out + err
        assert finish(waiting)[0] == 0
        if "Correlation coefficient" not in err:
            return out
    raise AssertionError(f"{tool} could not time a cycle in ten runs")


def last_row(out: str) -> list[float]:
    """The numbers of perftest's last row of results; its deviation of very unequal ones is -nan."""
    rows = re.findall(r"^\s*\d+(?:\s+(?:[\d.]+|-nan))+\s*$", out, re.MULTILINE)
    assert rows, out
    return [float(word) for word in rows[-1].split()]


def test_perftest_latency(shared_lab: rdmalab.Lab, sh: Callable, start: Start) -> None:
    """Columns: bytes, iterations, then min, max, typical in microseconds."""
    tool = "ib_send_lat -n 200 -s 64"
    row = last_row(between(shared_lab, sh, start, "bob", "alice", tool))
    print(f"{tool}: typical {row[4]} us")
    assert row[0] == 64 and row[1] == 200 and 0 < row[2] <= row[4] <= row[3]


@pytest.mark.parametrize("mtu", [1024, 4096])
def test_perftest_write_bandwidth(
    shared_lab: rdmalab.Lab, sh: Callable, start: Start, mtu: int
) -> None:
    """Columns: bytes, iterations, then peak and average MiB/s."""
    tool = f"ib_write_bw -n 200 -s 65536 -m {mtu}"
    out = between(shared_lab, sh, start, "bob", "alice", tool)
    row = last_row(out)
    print(f"{tool}: {row[3]} MiB/s")
    assert re.search(rf"Mtu\s+: {mtu}\[B\]", out) and row[0] == 65536 and row[3] > 0


@pytest.mark.parametrize(("server", "client"), [("bob", "alice"), ("alice", "bob")])
def test_rping_both_ways(
    shared_lab: rdmalab.Lab, sh: Callable, start: Start, server: str, client: str
) -> None:
    """rdma_cm finds the right device by address on each host: five pings, data compared (-V)."""
    ip = shared_lab[server].ip
    waiting = start(server, "--", "rping", "-s", "-a", ip, "-C", "5", "-V")
    wait_until(lambda: "LISTEN" in sh(shared_lab, server, "rdma resource show cm_id").out)
    code, out, err = finish(start(client, "--", "rping", "-c", "-a", ip, "-C", "5", "-V", "-v"))
    assert code == 0 and out.count("ping data: rdma-ping-") == 5, out + err
    assert finish(waiting)[0] == 0


def test_rdma_resource_shows_a_queue_pair_until_its_command_is_ended(
    lab: rdmalab.Lab, sh: Callable, start: Start, guest: Callable
) -> None:
    """B39: a restart of the host ends what holds the device, commands of ``exec`` included."""
    ping = ["ibv_rc_pingpong", "-d", "rxe_alice", "-g", str(lab.alice.gid_index)]
    process = start("alice", "--", *ping)
    listening(lab, sh, "alice", 18515)

    def queue_pairs() -> list[dict[str, object]]:
        shown = json.loads(guest(lab, "rdma -j resource show qp").out)
        mine = [qp for qp in shown if qp["ifname"] == "rxe_alice"]
        return [qp for qp in mine if qp.get("comm") == "ibv_rc_pingpong"]

    wait_until(lambda: bool(queue_pairs()))
    assert "ibv_rc_pingpong" in sh(lab, "alice", "rdma resource show qp").out
    assert "ibv_rc_pingpong" not in sh(lab, "bob", "rdma resource show qp").out
    lab.alice.restart()
    assert queue_pairs() == []
    assert finish(process)[0] == 137
