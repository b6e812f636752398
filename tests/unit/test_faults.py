"""Faults as plans: what is run in the guest, and which wishes are refused with a right example."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmalab import faults
from rdmalab.errors import BackendError, LabGone, UsageError

settings.register_profile("patient", deadline=None)  # a loaded machine may take its time
settings.load_profile("patient")
RIGHT = ["loss=5%", "loss=0.1%", "loss=100%", "delay=10ms", "delay=1.5s", "rate=100mbit", "down"]


def lines(host: str, *words: str) -> list[str]:
    """The plan as shell lines, with the host's name in front where it runs in its namespace."""
    plan = faults.plan(host, faults.parse(list(words)))
    return [" ".join([f"[{netns}]", *argv] if netns else argv) for argv, netns in plan]


def test_loss_delay_and_rate_meet_both_directions() -> None:
    assert lines("bob", "loss=5%", "delay=10ms", "rate=100mbit") == [
        "tc qdisc replace dev v-bob root netem loss 5% delay 10ms rate 100mbit limit 20000",
        "[bob] tc qdisc replace dev eth0 root netem loss 5% delay 10ms rate 100mbit limit 20000",
    ]


def test_down_takes_the_switch_port_down() -> None:
    assert lines("bob", "down") == ["ip link set v-bob down"]


def test_clear_undoes_whatever_there_is() -> None:
    assert lines("bob", "clear") == [
        "tc qdisc replace dev v-bob root noqueue",
        "tc qdisc del dev v-bob root",
        "[bob] tc qdisc replace dev eth0 root noqueue",
        "[bob] tc qdisc del dev eth0 root",
        "ip link set v-bob up",
    ]


def test_order_does_not_matter() -> None:
    assert lines("bob", "delay=1ms", "loss=1%") == lines("bob", "loss=1%", "delay=1ms")


@pytest.mark.parametrize("word", RIGHT)
def test_right_words(word: str) -> None:
    assert faults.plan("bob", faults.parse([word]))


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["loss"],
        ["loss="],
        ["loss=5"],
        ["loss=101%"],
        ["loss=-1%"],
        ["loss=5 %"],
        ["loss=five%"],
        ["loss=\u0665%"],
        ["loss=nan%"],
        ["delay=10"],
        ["delay=10 ms"],
        ["delay=10m"],
        ["rate=100"],
        ["rate=100MB"],
        ["rate=0kbit"],
        ["rate=00.00gbit"],
        ["rate=1000000000gbit"],
        ["rate=100mbit; reboot"],
        ["down=5s"],
        ["down=1"],
        ["clear=all"],
        ["clear", "loss=5%"],
        ["jitter=1ms"],
        ["=5%"],
        [""],
    ],
)
def test_wrong_words_are_answered_with_a_right_example(words: list[str]) -> None:
    """What the message shows can be typed as it stands."""
    with pytest.raises(UsageError) as caught:
        faults.parse(words)
    assert caught.value.exit_code == 2
    shown = re.findall(
        r"[a-z]+=[0-9.]+(?:%|[a-z]+)|\b(?:down|clear)\b|[0-9]+(?:%|ms|mbit)", str(caught.value)
    )
    assert shown, str(caught.value)


@given(st.lists(st.text(max_size=12), max_size=3))
def test_any_words_are_a_plan_or_a_usage_error(words: list[str]) -> None:
    try:
        settings = faults.parse(words)
    except UsageError:
        return
    assert faults.plan("bob", settings)


@given(st.sampled_from(["loss", "delay", "rate"]), st.text(max_size=12))
def test_a_value_reaches_tc_only_as_number_and_unit(key: str, value: str) -> None:
    """Nothing of a value can become another word of the command."""
    try:
        faults.parse([f"{key}={value}"])
    except UsageError:
        return
    assert re.fullmatch(r"[0-9.]+(%|us|ms|s|[kmg]bit)", value)


class Recorder:
    """A connection that remembers what it was asked to run, and fails when told to."""

    def __init__(self, failing: BaseException | None = None, after: int = 0) -> None:
        self.lines: list[str] = []
        self.failing, self.after = failing, after

    def run(self, op: str, argv: list[str], **args: object) -> str:
        assert op == "errand"
        self.lines.append(" ".join(argv))
        if self.failing is not None and len(self.lines) > self.after:
            failing, self.failing = self.failing, None
            raise failing
        return ""


def test_a_fault_shows_what_it_stands_for() -> None:
    fault = faults.Fault(Recorder(), "bob", loss="5%")  # type: ignore[arg-type]
    assert fault.commands[1].startswith("ip netns exec bob tc qdisc replace dev eth0")
    assert repr(fault) == "<Fault on bob: loss=5%>"
    assert repr(faults.Fault(Recorder(), "bob", down=True)) == "<Fault on bob: down>"  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [ValueError("of the learner"), KeyboardInterrupt()])
def test_a_fault_is_undone_however_its_block_ends(error: BaseException) -> None:
    remote = Recorder()
    with pytest.raises(type(error)), faults.Fault(remote, "bob", loss="5%"):  # type: ignore[arg-type]
        raise error
    assert remote.lines == ["fault loss=5%", "fault clear"]


@pytest.mark.parametrize("error", [BackendError("tc failed"), KeyboardInterrupt()])
def test_a_fault_that_was_put_half_way_is_undone(error: BaseException) -> None:
    """The block is never entered then, so nobody else would."""
    remote = Recorder(error)
    with pytest.raises(type(error)), faults.Fault(remote, "bob", loss="5%"):  # type: ignore[arg-type]
        raise AssertionError("the block must not run")
    assert remote.lines == ["fault loss=5%", "fault clear"]


def test_a_lab_that_is_gone_has_no_fault_to_undo() -> None:
    """The error that matters is the block's own, not that the undoing met nobody."""
    remote = Recorder(LabGone("gone"), after=1)
    with pytest.raises(ZeroDivisionError), faults.Fault(remote, "bob", loss="5%"):  # type: ignore[arg-type]
        _ = 1 / 0
