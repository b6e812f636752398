"""Submissions that do harm, on real hosts: each costs its own points, and the rest is graded.

All of them are in a few notebooks, since a machine takes a second and a replay the time of all
cells before it. What must be kept out (files, networks, hidden tests) gives a point only if it is.
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from rdmalab.grading.classroom import Classroom
from rdmalab.grading.results import SubmissionResult
from rdmalab.grading.runner import Limits

from .many import CANARY, answered, hand_in, make_course

pytestmark = [pytest.mark.fabric, pytest.mark.timeout(1200)]

STUBBORN = """
import time
while True:
    try:
        time.sleep(1)
    except KeyboardInterrupt:
        pass
"""
BOMB = """
import os
while True:
    os.fork()
"""
EATER = """
piece = []
while True:
    piece.append(bytearray(1 << 24))
"""
# id -> (host, answer, how the check must end)
ENDLESS = {
    "loop": ("", "while True: pass", "raised"),
    "loop-there": ("alice", "while True: pass", "raised"),
    "printing": ("", "while True: print('y' * 1000)", "raised"),
    "asking": ("", "asking = input()", "raised"),
    "typing": ("alice", "typing = = 1", "raised"),
    "raising": ("bob", "raise SystemExit", "raised"),
}
DEADLY = {
    "stubborn": ("", STUBBORN, "lost"),
    "leaving": ("", "import os; os._exit(0)", "lost"),
    "crashing": ("alice", "import ctypes; ctypes.string_at(0)", "lost"),
    "forking": ("bob", BOMB, "lost"),
    "eating": ("", EATER, "lost"),
}


def names(cases: dict[str, tuple[str, str, str]]) -> dict[str, str]:
    """Ids as names of variables, with their hosts; behind each a task that is solved."""
    found = {}
    for number, (name, (host, _, _)) in enumerate(cases.items()):
        found[name.replace("-", "")] = host
        found[f"after{number}"] = ("alice", "bob", "")[number % 3]
    return found


def run(tmp_path: Path, cases: dict[str, tuple[str, str, str]], limits: Limits) -> SubmissionResult:
    course = make_course(tmp_path / "labs", names(cases))
    answers = {name.replace("-", ""): answer for name, (_, answer, _) in cases.items()}
    file = hand_in(tmp_path / "evil.ipynb", answered(course, answers))
    room = Classroom(course, tmp_path / "out", "", limits, print)
    (result,) = room.grade([file], 1, lambda result, new: None)
    return result


def scores(result: SubmissionResult) -> dict[str, float]:
    return {task.task: task.score for task in result.tasks}


def reasons(result: SubmissionResult) -> dict[str, str]:
    return {task.task: task.checks[0].reason for task in result.tasks}


@pytest.mark.long
@pytest.mark.parametrize("cases", [ENDLESS, DEADLY], ids=["endless", "deadly"])
def test_b45_what_hangs_or_ends_a_kernel_costs_its_own_points_only(
    cases: dict[str, tuple[str, str, str]], tmp_path: Path
) -> None:
    """B45: loops, exits, crashes, fork bombs, memory, output, input, no Python at all."""
    result = run(tmp_path, cases, Limits(cell_s=20, output_bytes=1 << 20))
    found = scores(result)
    assert [name for name, score in found.items() if score] == [
        name for name in found if name.startswith("after")
    ], (result.notes, reasons(result))
    assert result.machines <= 1 + len(DEADLY)
    for name, (_, _, ended) in cases.items():
        said = reasons(result)[name.replace("-", "")]
        # On a busy machine what would obey an interrupt may be too late, and is lost as well.
        assert said.startswith("The answer ") or ended != "lost", (name, said)


OVERWRITING = {
    "printless": ("alice", "import builtins; builtins.print = lambda *x, **y: None"),
    "equal": ("alice", "class Yes(int):\n    __eq__ = lambda *x: True\nequal = Yes(7)"),
    "modules": ("bob", "import sys; sys.modules.clear()"),
    "ipython": ("", "import builtins; builtins.get_ipython = get_ipython = lambda: None"),
    "checker": ("alice", "well = lambda value: True"),
    "hooks": ("bob", "get_ipython().events.register('pre_run_cell', lambda *x: 1 / 0)"),
    "transformer": ("bob", "get_ipython().input_transformers_post.append(lambda x: ['pass'])"),
    "asserting": ("", "import builtins; builtins.AssertionError = Warning"),
    "display": ("", "import sys; sys.displayhook = sys.excepthook = sys.stdout = None"),
}


@pytest.mark.long
def test_b51_what_is_overwritten_gives_no_point_and_costs_nobody_else_one(tmp_path: Path) -> None:
    """B51: print, ==, sys.modules, get_ipython, the checker's functions, hooks, AssertionError."""
    cases = {name: (host, answer, "") for name, (host, answer) in OVERWRITING.items()}
    result = run(tmp_path, cases, Limits(cell_s=20))
    found = scores(result)
    assert {name for name, score in found.items() if not score} == set(OVERWRITING), (
        result.notes,
        reasons(result),
    )


READER = """
import os
seen = [p for p in {paths!r} if os.path.exists(p)]
seen += [v for v in os.environ.values() if v in {values!r}]
reader = 1 if not seen else str(seen)
"""
CALLER = """
import socket
reached = []
for place in {places!r}:
    try:
        socket.create_connection(tuple(place), 1).close()
        reached.append(place)
    except OSError:
        pass
{name} = 1 if not reached else str(reached)
"""
HUNTER = """
import sys, gc, inspect
found = []
class Probe:
    pass
def hunt():
    frame = sys._getframe()
    while frame:
        found.append((frame.f_code.co_consts, dict(frame.f_globals), dict(frame.f_locals)))
        frame = frame.f_back
hunt()
try:
    found.append(open('/proc/self/mem', 'rb').read(1))
except Exception as error:
    found.append(error)
try:
    found.append(gc.get_objects())
except Exception as error:
    found.append(error)
found = repr(found)
print(found[:1000], file=sys.stderr)
hunter = found if {canary!r}[:9] in found else 1
"""


def test_b51_files_networks_and_hidden_tests_are_out_of_reach(tmp_path: Path) -> None:
    """B51, B47: grader's files and environment, other submissions, its loopback, hidden tests."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        paths = [str(tmp_path), os.path.expanduser("~/.cache"), str(Path(__file__))]
        values = [os.environ["RDMALAB_RUNTIME_DIR"], os.getcwd()]
        places = [["127.0.0.1", port], ["10.0.2.2", port], ["10.0.2.2", 22], ["192.0.2.1", 80]]
        # In two pieces, or the search would find itself.
        canary = CANARY[:6] + "' + '" + CANARY[6:]
        cases = {
            "reader": ("", READER.format(paths=paths, values=values), ""),
            "caller": ("", CALLER.format(places=places, name="caller"), ""),
            "callerthere": ("alice", CALLER.format(places=places, name="callerthere"), ""),
            "hunter": ("", HUNTER.format(canary=canary), ""),
        }
        result = run(tmp_path, cases, Limits(cell_s=30))
    assert all(scores(result).values()), (result.notes, reasons(result))
    handed = [file.read_text() for file in (tmp_path / "out" / "feedback").iterdir()]
    handed.append(json.dumps(result.as_dict()["feedback"]))
    assert not [text for text in handed if CANARY in text]
