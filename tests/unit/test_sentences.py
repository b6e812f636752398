"""What a check may tell a learner: what its public form can say, and nothing that is hidden."""

from __future__ import annotations

import time

import pytest

from rdmalab.grading.sentences import CUT, FILL_CHARACTERS, Sentences

PUBLIC = """
answer = f(3)
print(f"I asked for {answer!r}", "twice", end=".\\n")
print("Wrong." if answer else "Nothing came back.", answer)
print(*answer)
print(f"{len(answer):4} bytes to slot {answer}:", end=" ")
print("collected" if answer else f"collect() returned {answer}")
print("First line,\\nsecond line", answer, sep=": ")
assert answer, "It is missing."
assert answer == 6, f"It is {answer}, and " + "should be six."
"""
HIDDEN = 'assert f("xyzzy-4711") == 12, f"Not twelve: {answer}"'


@pytest.fixture
def said() -> Sentences:
    return Sentences(PUBLIC, HIDDEN)


@pytest.mark.parametrize(
    "line",
    [
        "I asked for 'six' twice.",
        "Nothing came back. None",
        "   3 bytes to slot 1: collected",
        "First line,",
        "second line: 12",
        "It is missing.",
        "It is 5, and should be six.",
    ],
)
def test_what_the_public_form_can_say_is_told(line: str, said: Sentences) -> None:
    assert said.lines(line + "\n") == [line]


@pytest.mark.parametrize(
    "line",
    [
        "xyzzy-4711",
        "Not twelve: 13",
        "It is five",
        "assert f('xyzzy-4711') == 12",
        "anything at all",
        "",
        "a b c",
    ],
)
def test_what_it_cannot_say_is_left_out(line: str, said: Sentences) -> None:
    assert said.lines(line + "\n") == []


def test_b47_what_fills_a_gap_quotes_no_hidden_test(said: Sentences) -> None:
    """B47: also with blanks in it, and among other text."""
    for found in ("xyzzy-4711", "x y z z y - 4 7 1 1", "see: xyzzy-47", 'f( "xyzzy'):
        assert said.lines(f"I asked for {found} twice.") == [f"I asked for {CUT} twice."]
    assert said.lines("I asked for xyz twice.") == ["I asked for xyz twice."]


def test_what_fills_a_gap_is_short_and_printable(said: Sentences) -> None:
    (line,) = said.lines(f"I asked for \x1b[2J{'y' * 500} twice.")
    assert "\x1b" not in line and line.endswith(f"{CUT} twice.")
    assert len(line) < FILL_CHARACTERS + 40


def test_a_line_made_to_be_hard_takes_no_time(said: Sentences) -> None:
    begin = time.monotonic()
    assert len(said.lines("I asked for " + ", and ".join(["It is "] * 100_000))) < 2
    assert len(said.lines("It is missing.\n" * 100_000)) < 100
    assert time.monotonic() - begin < 5
