"""The judge against hostile cells, in a Python process of its own: no host is needed for that.

Each case runs cells as a kernel would, and between them a check that a wrong answer must fail and
one that a right answer must pass. What a case does to its process, it does to that process only.
The same cases, and those that need a kernel, run on a host in tests/fabric/test_judge.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rdmalab.hostside import checkcode, judge
from rdmalab.verdicts import Brief, Outcome, opened, question

from ..hostile import CHECK, HOSTILE, NEEDS_IDLE, RIGHT, SAID, WRONG

ROOT = Path(__file__).parents[2]
SECRET = b"known to the grader alone"
KERNEL = """
import json, os, sys
from rdmalab.hostside import judge

out, steps = os.fdopen(os.dup(1), "w"), json.loads(sys.stdin.read())
dump, space = json.dumps, {"__name__": "__main__", "get_ipython": None}
aftermath = judge.convene(bytes.fromhex(sys.argv[1]), *judge.prepare(), space)
for kind, text in steps:
    if kind == "check":
        out.write(dump(judge.answer({"text": text})) + chr(10))
        out.flush()
        continue
    try:
        exec(compile(text, "<cell>", "exec"), space)
    except Exception as error:
        print(repr(error), file=sys.__stderr__)
    aftermath()
out.close()
os._exit(0)
"""


def asked(*steps: str | tuple[str, Brief]) -> list[tuple[str, Any]]:
    """Run cells and checks (texts that begin with ``#check``); each check's question and reply."""
    told: list[tuple[str, str]] = []
    for step in steps:
        text, brief = step if isinstance(step, tuple) else (step, Brief())
        is_check = text.startswith("#check")
        told.append(("check", question(text, brief)) if is_check else ("cell", text))
    done = subprocess.run(
        [sys.executable, "-c", KERNEL, SECRET.hex()],
        input=json.dumps(told),
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )
    texts = [text for kind, text in told if kind == "check"]
    replies: list[Any] = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(replies) == len(texts), done.stderr
    return list(zip(texts, replies, strict=True))


def judged(*steps: str | tuple[str, Brief]) -> list[Outcome]:
    """As :func:`asked`; the outcomes that the replies tell."""
    return [opened(SECRET, text, reply) for text, reply in asked(*steps)]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_wrong_answer_fails_whatever_stands_in_the_way_and_a_right_one_passes_after_it(
    name: str,
) -> None:
    wrong, right = judged(WRONG + HOSTILE[name], CHECK, RIGHT, CHECK)
    assert wrong.ended != "ok", wrong
    assert wrong.why, "It does not say why."
    if name in NEEDS_IDLE:
        assert right.ended == "refused" and "thread" in right.why
    else:
        assert right == Outcome("ok", "", SAID)


def test_a_right_answer_passes_and_says_what_the_check_prints() -> None:
    assert judged(RIGHT, CHECK) == [Outcome("ok", "", SAID)]


def test_a_failed_assertion_is_told_with_its_sentence() -> None:
    (outcome,) = judged(WRONG, CHECK)
    assert (outcome.ended, outcome.why) == ("raised", "That is not the double of 3.")


def test_an_error_is_told_with_its_kind() -> None:
    (outcome,) = judged("def double(x):\n    return x['y']", CHECK)
    assert outcome.ended == "raised" and outcome.why.startswith("TypeError: ")


def test_a_value_of_an_own_class_is_named() -> None:
    (outcome,) = judged("class Six(int): pass\nanswer = [{1: Six(6)}]", "#check\nassert answer")
    assert outcome.ended == "refused"
    assert outcome.why.startswith("`answer` holds an object of a class that the notebook itself")
    assert "(Six, a kind of int)" in outcome.why


POOL = """
class Pool:
    def __init__(self): self.free = [1]
    def take(self): return self.free.pop()"""
TAKE = "#check\npool = Pool()\nassert pool.take() == 1, 'no slot'\nassert pool.free == [], 'left'"


def test_a_class_that_the_task_asks_for_is_judged() -> None:
    assert judged(POOL, (TAKE, Brief(asked=["Pool"]))) == [Outcome("ok")]


@pytest.mark.parametrize("method", ["__eq__", "__del__", "__getattribute__"])
def test_a_class_that_is_asked_for_may_not_say_what_equals_it(method: str) -> None:
    cell = f"{POOL}\n    def {method}(self, *a): return object.{'__repr__'}(self)"
    (outcome,) = judged(cell, (TAKE, Brief(asked=["Pool"])))
    assert outcome.ended == "refused" and method in outcome.why


def test_an_attribute_of_a_learners_object_is_looked_at() -> None:
    cell = POOL.replace("[1]", "type('L', (list,), {'__eq__': lambda *a: True})([1, 1])")
    (outcome,) = judged(cell, (TAKE, Brief(asked=["Pool"])))
    assert outcome.ended == "refused"


def test_the_labs_own_definitions_are_made_anew() -> None:
    given = "LIMIT = 6\ndef holds(x):\n    return double(x) == LIMIT"
    cell = WRONG + "LIMIT = 5\ndef holds(x):\n    return True"
    check = "#check\nassert holds(3), 'no'"
    assert judged(cell, (check, Brief(given=given)))[0] == Outcome("raised", "no")


def test_what_a_check_has_made_reaches_a_later_check_but_not_the_notebook() -> None:
    first = ("#check\nresults = [double(3)]\nassert results", Brief(later=["results"]))
    later = ("#check\nassert results == [6], results", Brief(carry=["results"]))
    told = judged(RIGHT, first, "assert 'results' not in globals()\nresults = [7]", later)
    assert told == [Outcome("ok"), Outcome("ok")]


def test_what_a_check_makes_anew_for_the_lab_is_there_in_the_next_cell() -> None:
    check = ("#check\nqp = qp + 1\nassert double(qp)", Brief(keep=["qp"]))
    seen = "#check\nassert qp == 2 and seen == 2"
    told = judged(RIGHT + "qp = 1\ndef double(x):\n    global seen\n    seen = qp", check, seen)
    assert told[0].ended == "raised"  # double() returns None; but it has seen the new one
    assert told[1] == Outcome("ok")


def test_what_a_function_sets_is_seen_by_the_check_that_calls_it() -> None:
    cell = "count = 0\ndef draw():\n    global count\n    count += 1\n    return count"
    assert judged(cell, "#check\ndraw()\ndraw()\nassert count == 2, count") == [Outcome("ok")]


def test_a_generator_and_a_callback_are_the_learners_on_a_stack_of_their_own() -> None:
    cell = """
import sys
def depth():
    frame, depth = sys._getframe(), 0
    while frame:
        frame, depth = frame.f_back, depth + 1
    return depth
def items():
    yield depth()
def key(x):
    return depth()
"""
    check = "#check\nfound = [*items(), *map(key, [1]), max([0], key=key)]\nassert max(found) < 9"
    assert judged(cell, check) == [Outcome("ok")]


def test_what_a_check_makes_itself_is_not_taken_from_the_notebook() -> None:
    cell = RIGHT + "class Own(int): pass\nfound = Own(1)"
    assert judged(cell, "#check\nfound = double(3)\nassert found == 6, 'no'") == [Outcome("ok")]


def test_output_is_kept_up_to_a_bound() -> None:
    (outcome,) = judged(
        "def double(x):\n    print('x' * 10_000_000)\n    return 6\nanswer = 6", CHECK
    )
    assert outcome.ended == "ok" and len(outcome.printed) == 65536


def test_nothing_of_a_check_stays_in_the_notebook() -> None:
    cell = """
import gc, linecache, sys, types
def left():
    names = [name for name in globals() if name.startswith('secret')]
    lines = [key for key in linecache.cache if 'check' in key]
    return names + lines + [getattr(sys, 'last_traceback', None) or ''][1:]
"""
    hidden = "#check\nsecret_value = 4711\nassert answer == secret_value, 'no'"
    told = judged(WRONG + cell, hidden, "#check\nassert left() == [], left()")
    assert told == [Outcome("raised", "no"), Outcome("ok")]


def test_a_reply_without_the_seal_is_not_believed() -> None:
    text = question("assert False", Brief())
    for reply in ({}, {"ended": "ok", "why": "", "printed": "", "seal": ""}, {"ended": ["ok"]}):
        assert opened(SECRET, text, reply).ended == "refused"


def test_a_seal_is_good_for_one_question_only() -> None:
    (text, reply), (again, _) = asked("#check\nassert 1", "#check\nassert 1")
    assert text != again  # the same check, asked twice
    assert opened(SECRET, text, reply).ended == "ok"
    assert opened(SECRET, again, reply).ended == "refused"


def test_a_kernel_without_a_judge_refuses() -> None:
    assert judge.answer({"text": "{}"})["ended"] == "refused"


def test_a_check_that_is_no_python_is_refused() -> None:
    with pytest.raises(checkcode.CheckError, match="no plain Python"):
        question("#check\n!ls", Brief())


# ---------------------------------------------------------------- names and definitions


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("x = y\nprint(x)", {"y"}),
        ("x = x + 1", {"x"}),
        ("x += 1", {"x"}),
        ("for i in q:\n    print(i)", {"q"}),
        ("with lab.capture() as wire:\n    pass\nwire.x", {"lab"}),
        ("def f(a):\n    return a + b", {"b"}),
        ("[i for i in n]", {"n"}),
    ],
)
def test_what_a_source_reads_before_it_has_made_it(source: str, names: set[str]) -> None:
    found = checkcode.free(checkcode.parse(source))
    assert found - {"i"} == names


@pytest.mark.parametrize(
    ("cells", "kept"),
    [
        ([("import a\nx = 1\nLIMIT = 3\ndef f(): pass", True)], "import a LIMIT def f()"),
        ([("def f(): pass", True), ("def f(): pass", False)], ""),
        ([("T = {1: 2}", True), ("T[3] = 4", True)], ""),
        ([("from m import a, b", True), ("b = 1", False)], "from m import a"),
        ([("A = m.x | m.y", True)], ""),
        ([("import m\nA = m.x | m.y", True)], "import m A = m.x | m.y"),
        ([("LATE = measured()", True)], ""),
        ([("!ls", True), ("class C: pass", True)], "class C"),
    ],
)
def test_what_the_lab_has_defined(cells: Sequence[tuple[str, bool]], kept: str) -> None:
    words = " ".join(checkcode.definitions(cells).split())
    assert all(word in words for word in kept.split())
    assert bool(words) == bool(kept)
