"""Faults on the wire, seen by witnesses that we did not write: ping, tc, ip and rdma's counters."""

from __future__ import annotations

import concurrent.futures
import json
import os
import re
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

import rdmalab
from rdmalab.errors import UsageError

pytestmark = [pytest.mark.fabric, pytest.mark.timeout(300)]

Shell = Callable[..., Any]
QDISCS = "tc qdisc show; ip netns exec alice tc qdisc show; ip netns exec bob tc qdisc show"
LINKS = "ip -br link show; ip -netns bob -br link show"


def ping(sh: Shell, lab: rdmalab.Lab, *options: str) -> tuple[int, float]:
    """From alice to bob: how many of the pings came back, and their median time in ms."""
    words = " ".join(options) or "-c 3 -i 0.2 -W 1"
    out = sh(lab, "alice", f"ping {words} 10.0.0.2").out
    times = sorted(float(ms) for ms in re.findall(r"time=([0-9.]+) ms", out))
    received = re.search(r"(\d+) received", out)
    assert received is not None, out
    return int(received[1]), times[len(times) // 2] if times else 0.0


def state(guest: Shell, lab: rdmalab.Lab) -> str:
    """Everything that a fault could have changed."""
    return str(guest(lab, f"{QDISCS}; {LINKS}").out)


@pytest.fixture
def lab(shared_lab: rdmalab.Lab) -> rdmalab.Lab:
    """The shared pair, its kernels as they are: a fault does nothing to them."""
    return shared_lab


@pytest.fixture
def before(lab: rdmalab.Lab, guest: Shell, sh: Shell) -> Any:
    """The pair without a fault; at the end it must be so again."""
    seen = state(guest, lab)
    assert "netem" not in seen
    yield seen
    assert state(guest, lab) == seen
    assert ping(sh, lab, "-c 1 -W 5")[0] == 1


def test_loss(lab: rdmalab.Lab, sh: Shell, guest: Shell, before: str) -> None:
    """A third of what travels each way: under a half of all pings come back, and some do."""
    with lab.fault("bob", loss="33%"):
        count, _ = ping(sh, lab, "-c 100 -i 0.01 -W 1")
        assert 20 <= count <= 70, count
        assert guest(lab, QDISCS).out.count("netem") == 2, "both directions"
    with lab.fault("bob", loss="100%"):
        assert ping(sh, lab, "-c 3 -i 0.1 -W 1")[0] == 0


def test_loss_makes_rdma_send_again(lab: rdmalab.Lab, sh: Shell, before: str) -> None:
    """The hardware counters of rxe tell, and perftest moves all its messages all the same."""
    common = f"-x {lab.alice.gid_index} -n 200 -s 4096 -m 1024 -u 12 -F"

    def write(port: int) -> int:
        """perftest from alice to bob; how many times something was asked for or sent again."""
        with concurrent.futures.ThreadPoolExecutor() as pool:
            server = pool.submit(sh, lab, "bob", f"ib_write_bw -p {port} {common}")
            client = f"ib_write_bw -p {port} {common} 10.0.0.2"
            tries = f"for i in $(seq 60); do {client} && exit 0; sleep 0.2; done; exit 1"
            assert sh(lab, "alice", tries).code == 0
            assert server.result(60).code == 0
        shown = json.loads(sh(lab, "alice", "rdma -j statistic show link rxe_alice/1").out)
        return int(shown[0]["completer_retry_err"]) + int(shown[0]["rcvd_seq_err"])

    start = write(18600)
    clean = write(18601) - start  # a busy machine may cost a retry as well
    with lab.fault("bob", loss="5%"):
        assert write(18602) - start - clean >= clean + 5


def test_delay(lab: rdmalab.Lab, sh: Shell, before: str) -> None:
    """50 ms each way; emulation may add to that, never take away."""
    with lab.fault("bob", delay="50ms"):
        count, median_ms = ping(sh, lab)
        assert count == 3 and 99 <= median_ms < 1000
    assert ping(sh, lab)[1] < 90


def test_rate(lab: rdmalab.Lab, sh: Shell, before: str) -> None:
    """2000 bytes at 400 kbit/s take 40 ms each way."""
    with lab.fault("bob", rate="400kbit"):
        count, median_ms = ping(sh, lab, "-c 3 -i 0.5 -W 2 -s 2000")
        assert count == 3 and 80 <= median_ms < 1000


def test_down(lab: rdmalab.Lab, sh: Shell, guest: Shell, before: str) -> None:
    """The host's cable is pulled: no carrier at its end, and no way to it."""
    with lab.fault("bob", down=True):
        assert ping(sh, lab, "-c 2 -i 0.2 -W 1")[0] == 0
        assert "NO-CARRIER" in guest(lab, "ip -netns bob link show eth0").out


def test_all_at_once_and_one_after_another(lab: rdmalab.Lab, guest: Shell, before: str) -> None:
    """A fault takes the place of the one before it; leaving any of them leaves none."""
    with lab.fault("bob", loss="1%", delay="1ms", rate="1gbit") as first:
        shown = guest(lab, "tc qdisc show dev v-bob").out
        assert all(word in shown for word in ("loss 1%", "delay 1ms", "rate 1Gbit", "limit 20000"))
        with lab.fault("bob", delay="2ms"):
            shown = guest(lab, "tc qdisc show dev v-bob").out
            assert "delay 2ms" in shown and "loss" not in shown
        assert "netem" not in guest(lab, QDISCS).out
        first.__exit__()
        first.__exit__()


def test_undone_after_an_error_in_the_block(lab: rdmalab.Lab, before: str) -> None:
    with pytest.raises(rdmalab.RemoteError), lab.fault("bob", loss="100%"):
        lab.alice.run("1 / 0")


def test_undone_after_an_error_of_the_notebook_in_the_block(lab: rdmalab.Lab, before: str) -> None:
    with pytest.raises(ZeroDivisionError), lab.fault("alice", delay="5ms"):
        _ = 1 / 0


def test_undone_after_the_stop_button(lab: rdmalab.Lab, before: str) -> None:
    """KeyboardInterrupt in the middle of a cell on the host, as from the notebook's button."""
    with pytest.raises(KeyboardInterrupt), lab.fault("bob", loss="100%", down=True):
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        lab.alice.run("import time; time.sleep(60)")


def test_wrong_faults(lab: rdmalab.Lab, before: str) -> None:
    """Refused before anything is run, with a right example."""
    with pytest.raises(UsageError, match="no host 'carol'"):
        lab.fault("carol", loss="5%")
    with pytest.raises(UsageError, match="a percentage such as 5%"):
        lab.fault("bob", loss=5)
    with pytest.raises(UsageError, match="a rate such as 100mbit"):
        lab.fault("bob", rate="0kbit")
