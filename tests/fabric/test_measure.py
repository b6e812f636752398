"""rdmalab.measure between two real hosts, beside perftest's own figures; rdmalab bench.

B52: nothing here judges how long something took. What is judged: how many samples there are, what
the device's counters say, and that the parsers find what the tools themselves print.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

import rdmalab
from rdmalab import bench
from rdmalab.errors import RemoteError

pytestmark = [pytest.mark.fabric, pytest.mark.long, pytest.mark.timeout(300)]

KINDS = ("tcp", "send", "write", "read")
SERVE = "from rdmalab import measure\nserved = measure.server()"


@pytest.fixture
def ask(lab: rdmalab.Lab) -> Iterator[Callable[[str], None]]:
    """Run code on alice in a session with bob; both must end well."""
    job = lab.bob.start(SERVE)

    def run(code: str) -> None:
        lines = "\n".join(f"    {line}" for line in code.splitlines())
        head = 'from rdmalab import measure, tools\nwith measure.Session("bob") as session:\n'
        lab.alice.kernel.run(head + lines, timeout_s=200)
        job.result(30)

    yield run
    job.stop()


def rnr(lab: rdmalab.Lab, host: str) -> int:
    """How often a host's device has sent or got 'receiver not ready'."""
    link = f"{lab[host].device}/1"
    words = ["rdma", "-j", "statistic", "show", "link", link]
    counters = json.loads(lab.remote.run("exec", words, host=host))[0]
    return int(counters["send_rnr_err"]) + int(counters["rcvd_rnr_err"])


# ---------------------------------------------------------------- ping-pong


def test_four_kinds_from_one_byte_to_64_kib(lab: rdmalab.Lab, ask: Callable[[str], None]) -> None:
    sizes = (1, 64, 4097, 65536)
    ask(
        "got = {}\n"
        f"for kind in {KINDS}:\n"
        f"    for size in {sizes}:\n"
        "        lat_us = session.run(kind, size=size, rounds=30)\n"
        "        got[f'{kind} {size}'] = [len(lat_us), float(lat_us.min())]"
    )
    got = lab.alice.get("got")
    assert len(got) == len(KINDS) * len(sizes)
    for kind, (count, least) in got.items():
        assert 10 <= count <= 30 and least > 0, kind


def test_b17_the_reference_ping_pong_never_meets_a_receiver_that_is_not_ready(
    lab: rdmalab.Lab, ask: Callable[[str], None]
) -> None:
    """2000 rounds, however long they take; both devices' counters stay as they were."""
    before = rnr(lab, "alice") + rnr(lab, "bob")
    ask("count = len(session.run('send', rounds=2000, at_most_s=60))")
    assert lab.alice.get("count") >= 10
    assert rnr(lab, "alice") + rnr(lab, "bob") == before


def test_a_slow_machine_gets_fewer_rounds_and_not_a_longer_wait(
    lab: rdmalab.Lab, ask: Callable[[str], None]
) -> None:
    """B52: with no time at all, the least number of rounds is run."""
    ask("count = len(session.run('send', rounds=5000, at_most_s=0))")
    assert lab.alice.get("count") == 10


def test_the_other_side_of_a_read_sleeps(lab: rdmalab.Lab, ask: Callable[[str], None]) -> None:
    """What bob's process has used: for TCP he wakes in each round, for READ in none."""
    ask(
        "used = {}\n"
        "for kind in ('tcp', 'read'):\n"
        "    count = len(session.run(kind, rounds=200))\n"
        "    used[kind] = session.peer_used['voluntary'] / count"
    )
    used = lab.alice.get("used")
    assert used["read"] < 0.2 < used["tcp"]


def test_one_ping_pong_in_one_call(lab: rdmalab.Lab) -> None:
    job = lab.bob.start(SERVE)
    lab.alice.kernel.run("from rdmalab import measure\nlat_us = measure.client('write', 'bob')")
    job.result(30)
    assert lab.alice.get("lat_us").dtype == "float64"


# ---------------------------------------------------------------- who is not there


def test_nobody_serves(lab: rdmalab.Lab) -> None:
    with pytest.raises(RemoteError, match="run measure.server\\(\\) there first"):
        lab.alice.kernel.run("from rdmalab import measure\nmeasure.Session('bob', wait_s=0.2)")


def test_nobody_asks(lab: rdmalab.Lab) -> None:
    with pytest.raises(RemoteError, match="TimeoutError"):
        lab.bob.kernel.run("from rdmalab import measure\nmeasure.server(idle_s=0.2)")
    lab.bob.kernel.run("from rdmalab import measure")  # the host goes on


def test_the_one_who_asks_dies_and_the_server_ends(lab: rdmalab.Lab) -> None:
    job = lab.bob.start(SERVE)
    code = "from rdmalab import measure\nsession = measure.Session('bob')\nsession.run('send')"
    lab.alice.kernel.run(code)
    lab.alice.restart()
    job.wait(30)  # with an error or without, but soon
    job = lab.bob.start(SERVE)
    lab.alice.kernel.run("from rdmalab import measure\nlat_us = measure.client('send', 'bob')")
    job.result(30)


# ---------------------------------------------------------------- the C tools


def test_the_samples_of_perftest_have_the_median_that_it_prints(
    lab: rdmalab.Lab, ask: Callable[[str], None]
) -> None:
    """perftest's own t_typical is the witness of the parser."""
    ask(
        "said = []\n"
        "parse = tools.parse_perftest\n"
        "tools.parse_perftest = lambda text: (parse(text), said.append(text))[0]\n"
        "got = {kind: sorted(session.tool(kind, rounds=300).tolist()) for kind in"
        " ('send', 'write', 'read')}\n"
        "tools.parse_perftest = parse"
    )
    got, said = lab.alice.get("got"), lab.alice.get("said")
    for (kind, samples), text in zip(got.items(), said, strict=True):
        assert f"{kind.capitalize()} Latency Test" in text.replace("RDMA_", "")
        row = re.findall(r"^\s*64\s+\d+\s+(?:[\d.]+\s+)+[\d.]+\s*$", text, re.M)[-1].split()
        least, _, typical = (float(word) for word in row[2:5])  # its t_max leaves out the last two
        assert abs(samples[0] - least) < 0.02
        middle = len(samples) // 2
        assert samples[middle - 2] - 0.02 <= typical <= samples[middle + 2] + 0.02


# What perftest says when other work has come between its looks at the clock (get_clock.c).
UNSTEADY = """ #bytes        #iterations       t_min[usec]      t_max[usec]
 64      1000          inf            inf
Correlation coefficient r^2: 0.146588 < 0.9
"""


def test_a_run_of_perftest_that_could_not_time_a_cycle_is_repeated(
    lab: rdmalab.Lab, ask: Callable[[str], None]
) -> None:
    """Each time with a server of its own; whoever has no luck is told that the machine is busy."""
    ask(
        f"unsteady, left = {UNSTEADY!r}, 2\n"
        "parse, tries = tools.parse_perftest, measure.TOOL_TRIES\n"
        "def unlucky(text):\n"
        "    global left\n"
        "    left -= 1\n"
        "    return parse(unsteady if left >= 0 else text)\n"
        "tools.parse_perftest = unlucky\n"
        "got = len(session.tool('send', rounds=100))\n"
        "left, measure.TOOL_TRIES, told = 9, 2, ''\n"
        "try:\n"
        "    session.tool('send', rounds=100)\n"
        "except tools.ToolError as error:\n"
        "    told = str(error)\n"
        "tools.parse_perftest, measure.TOOL_TRIES = parse, tries"
    )
    assert lab.alice.get("got") > 50
    assert "the machine is too busy" in lab.alice.get("told")
    assert lab.alice.get("left") == 7


def test_the_samples_of_sockperf_are_half_round_trips(
    lab: rdmalab.Lab, ask: Callable[[str], None]
) -> None:
    """Sockperf's own summary is the witness; its smallest message is 14 bytes, so 1 becomes 14."""
    ask(
        "said = []\n"
        "attempt = tools.attempt\n"
        "tools.attempt = lambda *words: said.append(attempt(*words)) or said[-1]\n"
        "got = session.tool('tcp', size=1)\n"
        "tools.attempt = attempt"
    )
    text, samples = lab.alice.get("said")[-1], lab.alice.get("got")
    assert "--msg-size=14" in text or "Valid Duration" in text
    (least,) = re.findall(r"<MIN> observation =\s*([\d.]+)", text)
    assert samples.min() <= float(least) + 0.01  # the log has the warm-up's packets, too
    assert len(samples) > 0


# ---------------------------------------------------------------- rdmalab bench


def test_bench_reports_both_distributions_and_no_winner(
    lab: rdmalab.Lab, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """B44: what it measured on is said, and nothing is said to be faster. Little is measured."""
    monkeypatch.setattr(bench, "REPEATS", 2)
    monkeypatch.setattr(bench, "ROUNDS", 30)
    report = bench.measure(lab, lambda _: None)
    report.show(as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert [row["kind"] for row in document["rows"]] == list(KINDS)
    for row in document["rows"]:
        assert len(row["ratios"]) == 2 and row["ratio"] > 0
        for side in ("ours", "theirs"):
            told = row[side]
            shape = told["histogram"]
            assert sum(shape["counts"]) == told["count"] > 0
            assert len(shape["edges_us"]) == len(shape["counts"]) + 1
            assert told["min"] <= told["p50"] <= told["p99"] <= told["max"]
    assert {row["kind"]: row["kept"] is not None for row in document["rows"]} == {
        "tcp": True,
        "send": True,
        "write": False,
        "read": False,
    }
    report.show(as_json=False)
    shown = capsys.readouterr().out
    assert "Soft-RoCE" in shown and lab.state.accel in " ".join(document["caveats"])
    assert not re.search(r"faster|slower", shown)


@pytest.mark.long
def test_the_command_prints_one_document_and_leaves_nothing() -> None:
    words = [sys.executable, "-m", "rdmalab"]
    done = subprocess.run([*words, "bench", "--json"], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"]
    left = subprocess.run([*words, "status", "--json"], capture_output=True, text=True, timeout=60)
    assert "bench-" not in left.stdout
