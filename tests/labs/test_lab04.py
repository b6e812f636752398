"""Lab 04 on real hosts: what it states is measured in it, and no figure of time decides a mark."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest
from nbformat import NotebookNode

from .learner import (
    LABS,
    Attempt,
    Retries,
    assert_runs_again,
    assert_untouched,
    errors,
    full_marks,
    judge,
    judge_retries,
    marks,
    printed,
    retries,
    run,
    untouched,
)

pytestmark = [pytest.mark.labs, pytest.mark.timeout(1200)]

NAME = "04_tcp_rdma_latency"


# ---------------------------------------------------------------- right and wrong answers

NODELAY = "sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)\n"
TCP = """for _ in range(rounds):
    start = time.perf_counter_ns()
    sock.sendall(message)
    got = 0
    while got < len(message):
        got += len(sock.recv(len(message) - got))
    half_us.append((time.perf_counter_ns() - start) / 2000)"""

SEND = """for _ in range(rounds):
    start = time.perf_counter_ns()
    qp.post_recv(receive)
    qp.post_send(send)
    wait(arrived)
    half_us.append((time.perf_counter_ns() - start) / 2000)
    wait(sent)"""

FLAWS = 'flaw.update(zip("ABCDE", "nagle posted setup omission late".split()))'

JUDGED = """low = {name: line[64][1] for name, line in sweep.items()}
high = {name: line[64][2] for name, line in sweep.items()}
answers["S1"] = ["no", "yes"][high["TCP"] < low["RDMA SEND"]]
answers["S2"] = ["no", "yes"][all(s[65536][0] < 1024 * s[64][0] for s in sweep.values())]
answers["S3"] = "cannot tell"
answers["S4"] = "yes"
answers["S5"] = ["no", "yes"][switches["read"] < switches["tcp"]]
answers["S6"] = "cannot tell"
"""

TRIES = [
    Attempt(
        "tcp",
        "takes what one recv returns for the whole answer",
        NODELAY
        + "for _ in range(rounds):\n"
        + "    start = time.perf_counter_ns()\n"
        + "    sock.sendall(message)\n"
        + "    sock.recv(len(message))\n"
        + "    half_us.append((time.perf_counter_ns() - start) / 2000)",
        {
            "tcp-rounds": "Bob had more than one message before him",
            "tcp-half": "did the clock stop before the *whole* answer?",
        },
    ),
    Attempt(
        "tcp",
        "whole round trips for halves",
        NODELAY + TCP.replace("/ 2000", "/ 1000"),
        {"tcp-half": "is each sample *half* of a round trip?"},
    ),
    Attempt(
        "tcp",
        "all messages first, then all answers",
        NODELAY
        + "starts = []\n"
        + "for _ in range(rounds):\n"
        + "    starts.append(time.perf_counter_ns())\n"
        + "    sock.sendall(message)\n"
        + "for start in starts:\n"
        + "    got = 0\n"
        + "    while got < len(message):\n"
        + "        got += len(sock.recv(len(message) - got))\n"
        + "    half_us.append((time.perf_counter_ns() - start) / 2000)",
        {
            "tcp-rounds": "Bob had more than one message before him",
            "tcp-half": "More time than has passed",
        },
    ),
    Attempt("tcp", "Nagle's algorithm left on", TCP, {"tcp-nodelay": "still on"}),
    Attempt(
        "tcp",
        "right, into a buffer",
        NODELAY
        + "box = memoryview(bytearray(len(message)))\n"
        + "for _ in range(rounds):\n"
        + "    began, got = time.perf_counter(), 0\n"
        + "    sock.sendall(message)\n"
        + "    while got < len(box):\n"
        + "        got += sock.recv_into(box[got:])\n"
        + "    half_us.append((time.perf_counter() - began) * 1e6 / 2)",
    ),
    Attempt(
        "send",
        "B17: receive posted after the send has completed",
        "for _ in range(rounds):\n"
        "    start = time.perf_counter_ns()\n"
        "    qp.post_send(send)\n"
        "    wait(sent)\n"
        "    qp.post_recv(receive)\n"
        "    wait(arrived)\n"
        "    half_us.append((time.perf_counter_ns() - start) / 2000)",
        {"send-order": "while no receive for its answer is there"},
    ),
    Attempt(
        "send",
        "the clock stops at the completion of the SEND",
        "for _ in range(rounds):\n"
        "    start = time.perf_counter_ns()\n"
        "    qp.post_recv(receive)\n"
        "    qp.post_send(send)\n"
        "    wait(sent)\n"
        "    half_us.append((time.perf_counter_ns() - start) / 2000)\n"
        "    wait(arrived)",
        {"send-half": "which completion did you stop the clock at?"},
    ),
    Attempt(
        "send",
        "no receive at all",
        "for _ in range(rounds):\n"
        "    start = time.perf_counter_ns()\n"
        "    qp.post_send(send)\n"
        "    wait(arrived)\n"
        "    half_us.append((time.perf_counter_ns() - start) / 2000)\n"
        "    wait(sent)",
        {
            "send-order": "where should the answer go?",
            "send-rounds": "`send_pings` returned no samples",
            "send-half": "nothing to add up without samples",
        },
    ),
    Attempt(
        "send",
        "its own completions are never taken out",
        SEND.replace("\n    wait(sent)", ""),
        {"send-rounds": "Completions were left over"},
    ),
    Attempt(
        "send",
        "right, with all receives posted in advance",
        "for _ in range(rounds):\n"
        "    qp.post_recv(receive)\n"
        "def once():\n"
        "    began = time.perf_counter_ns()\n"
        "    qp.post_send(send)\n"
        "    wait(arrived)\n"
        "    ended = time.perf_counter_ns()\n"
        "    wait(sent)\n"
        "    return (ended - began) / 2 / 1e3\n"
        "half_us = [once() for _ in range(rounds)]",
    ),
    Attempt(
        "percentile",
        "the mean",
        "return sum(samples) / len(samples)",
        {"percentile-middle": "Two of the three", "percentile-tail": "Count how many"},
    ),
    Attempt(
        "percentile",
        "numpy's default, which invents values between samples",
        "import numpy\nreturn float(numpy.percentile(samples, p))",
        {"percentile-middle": "that is enough", "percentile-tail": "Count how many"},
    ),
    Attempt(
        "percentile",
        "not sorted",
        "return samples[math.ceil(len(samples) * p / 100) - 1]",
        {"percentile-middle": "Two of the three", "percentile-tail": "Count how many"},
    ),
    Attempt(
        "percentile",
        "one place too far",
        "return sorted(samples)[min(int(len(samples) * p / 100), len(samples) - 1)]",
        {"percentile-middle": "that is enough", "percentile-tail": "Count how many"},
    ),
    Attempt(
        "percentile",
        "sorts the caller's list",
        "samples.sort()\nreturn samples[math.ceil(len(samples) * p / 100) - 1]",
        {"percentile-middle": "The samples have been reordered"},
    ),
    Attempt(
        "percentile",
        "right, by counting",
        "import numpy\nreturn numpy.percentile(samples, p, method='inverted_cdf').item()",
    ),
    Attempt(
        "flaws",
        "A and E exchanged: both wait for something",
        FLAWS + '\nflaw["A"], flaw["E"] = "late", "nagle"',
        {
            "flaws-a": "a receive would be posted after the send",
            "flaws-e": "two small pieces would be sent over TCP",
        },
    ),
    Attempt(
        "flaws",
        "an outlier blamed for C and D",
        FLAWS + '\nflaw["C"] = flaw["D"] = "mean"',
        {"flaws-c": "a mean would be taken", "flaws-d": "a mean would be taken"},
    ),
    Attempt(
        "flaws",
        "B explained in words of one's own, D left out",
        FLAWS + '\nflaw["B"], flaw["D"] = "stops too early", ""',
        {"flaws-b": "none of the words in the table", "flaws-d": "no flaw of D yet"},
    ),
    Attempt("flaws", "right, in one line", FLAWS),
    Attempt(
        "conclusion",
        "B44: says that RDMA cards are slower, from a software device's data",
        JUDGED + 'answers["S3"] = "yes"',
        {"conclusion-limits": "which measurement above was made with an RDMA card?"},
    ),
    Attempt(
        "conclusion",
        "B44: the opposite, from hearsay",
        JUDGED + 'answers["S3"] = "no"\nanswers["S6"] = "no"',
        {"conclusion-limits": "which measurement above was made with an RDMA card?"},
    ),
    Attempt(
        "conclusion",
        "takes the system call of the software device for a card's",
        JUDGED + 'answers["S6"] = "yes"',
        {"conclusion-limits": "which program above ran on an RDMA card?"},
    ),
    Attempt(
        "conclusion",
        "dares to say nothing",
        'answers = dict.fromkeys(answers, "cannot tell")',
        {"conclusion-data": "Look again at S1"},
    ),
    Attempt("conclusion", "right, in another form", JUDGED),
]

RETRIES = retries(TRIES)


@pytest.mark.long
@pytest.mark.parametrize("attempt", TRIES, ids=str)
def test_an_answer_is_told_what_is_wrong_with_it(
    attempt: Attempt, tried: dict[str, NotebookNode]
) -> None:
    judge(attempt, tried[str(attempt)])


@pytest.mark.long
@pytest.mark.parametrize("attempt", RETRIES, ids=str)
def test_an_answer_is_not_judged_by_what_another_has_left(
    attempt: Retries, tried: dict[str, NotebookNode]
) -> None:
    judge_retries(attempt, tried)


# ---------------------------------------------------------------- the solved lab and its claims


def test_after_all_attempts_the_solution_still_passes(tried: dict[str, NotebookNode]) -> None:
    """B52: on a busy machine, too; no mark depends on how fast anything was."""
    done = tried[""]
    assert errors(done) == {}
    assert marks(done) == full_marks(NAME)
    assert sum(full_marks(NAME).values()) == 20
    assert printed(done, stream="stderr") == ""


def test_each_wrong_benchmark_is_wrong_by_what_the_lab_promises(
    tried: dict[str, NotebookNode],
) -> None:
    source = (LABS / "source" / f"{NAME}.py").read_text(encoding="utf-8")
    promised = {}
    for names, factors in re.findall(r"^# \| ([A-E, ]+) \| ([\d., times]+) \|$", source, re.M):
        numbers = [float(number) for number in re.findall(r"[\d.]+", factors)]
        promised |= dict(zip(names.split(", "), numbers, strict=True))
    assert set(promised) == set("ABCDE")
    found = re.findall(r"([A-E]) said .* wrong by ([\d.]+) times", printed(tried[""]))
    shown = {name: float(factor) for name, factor in found}
    assert set(shown) == set("ABCDE")
    assert {name for name in shown if shown[name] < promised[name]} == set(), shown


def test_b17_the_late_receive_shows_in_the_counter(tried: dict[str, NotebookNode]) -> None:
    said = printed(tried[""])
    (refused,) = re.findall(r"answered 'receiver not ready' (\d+) times", said)
    assert int(refused) > 0


def test_system_calls_are_counted_as_the_text_says(tried: dict[str, NotebookNode]) -> None:
    said = printed(tried[""])
    assert "tcp    system calls in a round: {'recvfrom': 1, 'sendto': 1}" in said
    for kind in ("send  ", "write ", "read  "):
        assert f"{kind} system calls in a round: {{'write': 1}}" in said


def test_b44_every_picture_tells_its_conditions_and_nothing_names_a_winner(
    tried: dict[str, NotebookNode],
) -> None:
    """Emulation and accelerator stand in each caption; no sentence says which is faster."""
    pictures = [
        output.data
        for cell in tried[""].cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if "image/png" in output.get("data", {})
    ]
    assert len(pictures) == 5
    for data in pictures:
        assert "Soft-RoCE" in data["text/html"] and "accel" in data["text/html"]
    source = (LABS / "source" / f"{NAME}.py").read_text(encoding="utf-8")
    winner = r"(RDMA|SEND|WRITE|READ|TCP) (is|was|are|were) (much )?(faster|slower|quicker) than"
    assert not re.search(winner, source)


@pytest.mark.long
def test_the_untouched_lab_fails_in_its_checks_only(folder: Path) -> None:
    """On hosts that have seen a solved one: no mark is left from there."""
    done = run(untouched(NAME), folder)
    assert_untouched(NAME, done)


@pytest.mark.long
def test_run_all_works_again_after_each_hosts_kernel_was_killed_in_the_middle(
    hosts: str, tmp_path: Path
) -> None:
    """Bob serves, and a kernel is killed before alice has asked.

    And somebody opens the notebook alone, without the table of figures: everything else works.
    """
    done = assert_runs_again(NAME, hosts, tmp_path, until='command = ["strace"')
    assert "is not beside this notebook" in printed(done)


# ---------------------------------------------------------------- the table of published figures

COLUMNS = "metric transport operation size_bytes value unit what conditions year year_is source"
UNITS = {"latency": "us", "message rate": "messages/s", "CPU cost": "cores"}
KINDS = {"paper", "thesis", "vendor", "user's test output"}
TABLE = (LABS / "data" / "hardware.csv").read_text(encoding="utf-8")
FIGURES = list(csv.DictReader(TABLE.splitlines()))


def test_each_published_figure_has_its_source_year_conditions_and_unit() -> None:
    assert list(FIGURES[0]) == [*COLUMNS.split(), "kind", "seen", "url"]
    for row in FIGURES:
        assert all(row[name].strip() for name in row if name != "size_bytes"), row
        assert row["unit"] == UNITS[row["metric"]] and float(row["value"]) > 0, row
        assert 1995 <= int(row["year"]) <= 2026 and row["kind"] in KINDS, row
        assert not row["size_bytes"] or int(row["size_bytes"]) > 0, row
        assert row["url"].startswith(("https://", "http://")), row


def test_the_table_has_every_transport_and_shows_where_sources_disagree() -> None:
    latency = {row["transport"]: [] for row in FIGURES if row["metric"] == "latency"}
    for row in FIGURES:
        if row["metric"] == "latency":
            latency[row["transport"]].append(float(row["value"]))
    assert {"InfiniBand", "RoCE", "iWARP", "TCP"} <= set(latency)
    assert all(len(set(latency[name])) > 1 for name in ("InfiniBand", "RoCE", "iWARP", "TCP"))
    assert {row["metric"] for row in FIGURES} == set(UNITS)
