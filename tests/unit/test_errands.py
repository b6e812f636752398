"""Errands: the controller's words and the guest's lines, and that no other word becomes a line."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdmalab import faults
from rdmalab.hostside import errands

PROGRAMS = {"tc", "ip", "tcpdump"}


def test_a_fault_is_all_of_its_lines() -> None:
    shell, dash_c, script = errands.line(["fault", "loss=5%", "delay=10ms"], "bob")
    plan = faults.plan("bob", faults.parse(["loss=5%", "delay=10ms"]))
    lines = [shlex.join(errands.inside(*step)) for step in plan]
    assert (shell, dash_c) == ("sh", "-c") and script.split(" && ") == lines


def test_a_capture_listens_on_the_hosts_own_link() -> None:
    line = errands.line(["capture", "100", "256"], "alice")
    assert line[:7] == ["ip", "netns", "exec", "alice", "tcpdump", "-i", "eth0"]
    assert line[-1] == "udp dst port 4791" and "100" in line and "256" in line


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["fault", "loss=5"],
        ["fault", "loss=5%\n"],
        ["fault", "loss=5%; reboot"],
        ["fault", "loss=$(reboot)%"],
        ["fault", "down=now"],
        ["fault", "loss"],
        ["fault", "jitter=1ms"],
        ["capture"],
        ["capture", "1"],
        ["capture", "1", "-w/etc/passwd"],
        ["capture", "1", "64", "-w"],
        ["root", "reboot"],
        ["reboot"],
    ],
)
def test_other_words_are_refused(words: list[str]) -> None:
    with pytest.raises(ValueError):
        errands.line(words, "bob")


@given(st.lists(st.text(max_size=12), max_size=4), st.sampled_from(["fault", "capture"]))
def test_whatever_is_asked_for_only_three_programs_run(words: list[str], errand: str) -> None:
    try:
        line = errands.line([errand, *words], "bob")
    except ValueError:
        return
    steps = line[2].split(" && ") if line[0] == "sh" else [shlex.join(line)]
    for step in filter(None, steps):
        argv = shlex.split(step)
        inner = argv[4:] if argv[:3] == ["ip", "netns", "exec"] else argv
        assert inner[0] in PROGRAMS
