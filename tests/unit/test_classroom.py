"""A class of submissions: files, names, what is done again, interrupts. Machines are processes."""

from __future__ import annotations

import json
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rdmalab.cli import main
from rdmalab.errors import MachineError, RdmalabError
from rdmalab.grading.classroom import Classroom, names_for
from rdmalab.grading.course import Course
from rdmalab.grading.plans import CheckPlan
from rdmalab.grading.results import Outcome, SubmissionResult
from rdmalab.grading.runner import Limits
from rdmalab.grading.supply import Supply

from .small_course import CANARY, NAME, SOLVED, ProcessMachine, hand_in, make_course, submission

QUICK = Limits(cell_s=3)


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Course:
    return make_course(tmp_path_factory.mktemp("course") / "labs")


def grade(
    course: Course, out: Path, files: list[Path], jobs: int = 1, lab: str = ""
) -> tuple[list[SubmissionResult], list[str]]:
    """All results, and the names of those that were run in this call."""
    new = []

    def heard(result: SubmissionResult, fresh: bool) -> None:
        if fresh:
            new.append(result.name)

    room = Classroom(course, out, lab, QUICK, print, ProcessMachine)
    return room.grade(files, jobs, heard), new


def test_names_are_harmless_and_tell_two_apart() -> None:
    files = [Path("a/x.ipynb"), Path("b/x.ipynb"), Path("c/../ü; rm -rf ~.ipynb"), Path("...ipynb")]
    assert names_for(files) == ["a-x", "b-x", "rm_-rf", "submission"]
    twice = names_for([Path("p/q/a b.ipynb"), Path("p/q/a;b.ipynb")])
    assert len(set(twice)) == 2 and all(name.startswith("q-a_b-") for name in twice)


@pytest.mark.parametrize("jobs", [1, 3])
def test_a_class_is_graded_and_one_bad_file_stops_nobody(
    jobs: int, course: Course, tmp_path: Path
) -> None:
    foreign = submission(course)
    foreign.metadata, foreign.cells = {}, [{"cell_type": "code", "source": "1", "metadata": {}}]
    files = [
        hand_in(tmp_path / "full.ipynb", submission(course, **SOLVED)),
        hand_in(tmp_path / "half.ipynb", submission(course, double="return 2 * x")),
        hand_in(tmp_path / "none.ipynb", submission(course)),
        tmp_path / "broken.ipynb",
        hand_in(tmp_path / "dies.ipynb", submission(course, double="import os; os._exit(0)")),
        hand_in(tmp_path / "foreign.ipynb", foreign),
    ]
    files[3].write_text("{")
    results, new = grade(course, tmp_path / "out", files, jobs)
    assert [r.name for r in results] == ["full", "half", "none", "broken", "dies", "foreign"]
    assert [r.score for r in results] == [5, 3, 0, 0, 0, 0] and sorted(new) == sorted(
        r.name for r in results
    )
    assert "is no notebook" in results[3].problem and "none of the labs" in results[5].problem
    table = (tmp_path / "out" / "results.csv").read_text().splitlines()
    assert len(table) == 7 and table[1].startswith("full,")
    assert {f.stem for f in (tmp_path / "out" / "feedback").iterdir()} == {r.name for r in results}


def test_only_what_is_new_or_changed_is_run_again(course: Course, tmp_path: Path) -> None:
    files = [
        hand_in(tmp_path / f"{name}.ipynb", submission(course, double="return 2 * x"))
        for name in "abc"
    ]
    out = tmp_path / "out"
    assert grade(course, out, files[:2])[1] == ["a", "b"]
    assert grade(course, out, files)[1] == ["c"]
    hand_in(files[1], submission(course, **SOLVED))
    results, new = grade(course, out, files)
    assert new == ["b"] and [r.score for r in results] == [3, 5, 3]
    (out / "feedback" / "c.html").unlink()
    (out / "results" / "a.json").write_text("{")
    assert sorted(grade(course, out, files)[1]) == ["a", "c"]
    assert grade(course, out, files)[1] == []


def test_a_lab_that_was_asked_for_is_what_counts(course: Course, tmp_path: Path) -> None:
    files = [tmp_path / "x.ipynb", hand_in(tmp_path / "y.ipynb", submission(course, **SOLVED))]
    files[0].write_text("")
    results, _ = grade(course, tmp_path / "out", files, lab=NAME)
    assert [(r.score, r.points) for r in results] == [(0, 5), (5, 5)]
    assert results[0].lab == NAME, "what cannot be read counts as nothing of that lab"


def test_an_interrupt_keeps_what_is_finished(course: Course, tmp_path: Path) -> None:
    """Ctrl-C while the second one hangs: the first is written, and no process is left."""
    files = [
        hand_in(tmp_path / "first.ipynb", submission(course, **SOLVED)),
        hand_in(tmp_path / "hangs.ipynb", submission(course, halve="while True: pass")),
    ]
    room = Classroom(course, tmp_path / "out", "", Limits(cell_s=60), print, ProcessMachine)

    def heard(result: SubmissionResult, new: bool) -> None:
        threading.Timer(1.0, interrupt).start()

    def interrupt() -> None:
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        room.grade(files, 1, heard)
    assert not any(machine.process.is_alive() for machine in room.supply.open)  # type: ignore[attr-defined]
    found = {file.name for file in (tmp_path / "out").rglob("*") if file.is_file()}
    assert found == {"first.json", "first.html", "results.csv"}
    again = Classroom(course, tmp_path / "out", "", room.limits, print, ProcessMachine)
    heard_again: list[bool] = []
    again.grade(files[:1], 1, lambda result, new: heard_again.append(new))
    assert heard_again == [False]


def test_a_computer_that_cannot_grade_says_so_and_tries_again(
    course: Course, tmp_path: Path
) -> None:
    file = hand_in(tmp_path / "x.ipynb", submission(course, **SOLVED))

    def broken(say: object) -> ProcessMachine:
        raise RdmalabError("no room")

    room = Classroom(course, tmp_path / "out", "", QUICK, print, broken)
    (result,) = room.grade([file], 1, lambda result, new: None)
    assert not result.graded and "not the notebook's fault" in result.notes[0]
    assert grade(course, tmp_path / "out", [file])[1] == ["x"]


def test_b47_nothing_that_is_handed_out_has_a_hidden_test(course: Course, tmp_path: Path) -> None:
    """B47: a canary in a hidden test, and submissions that fail in it or print what they see."""
    peep = "import sys\n    print(f'I looked at {sys._getframe(1).f_code.co_consts!r}.')\n    "
    answers = {
        "fails": "return 2 * x if type(x) is int else 0",
        "peeps": peep + "return 2 * x",
        "raises": "if type(x) is str: raise ValueError(x)\n    return 2 * x",
        "returns": "return x + x if type(x) is int else 'I looked at ' + x",
    }
    files = [
        hand_in(tmp_path / f"{name}.ipynb", submission(course, double=answer))
        for name, answer in answers.items()
    ]
    results, _ = grade(course, tmp_path / "out", files)
    assert [r.tasks[0].checks[1].score for r in results] == [0, 2, 0, 0]
    handed = [file.read_text() for file in (tmp_path / "out" / "feedback").iterdir()]
    handed += [json.dumps(r.as_dict()["feedback"]) for r in results]
    assert not [text for text in handed if CANARY in text or CANARY[-6:] in text]
    assert "not for something that it does not show" in "".join(handed)
    assert CANARY in "".join(json.dumps(r.as_dict()) for r in results), "the test sees nothing"


@pytest.fixture
def cli(
    course: Course, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., tuple[int, str, str]]]:
    """The command in this process: its exit code, standard output, standard error."""
    signals = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    before = [signal.getsignal(signum) for signum in signals]

    def run(*words: str, labs: Path = course.folder) -> tuple[int, str, str]:
        monkeypatch.setenv("RDMALAB_LABS", str(labs))
        with pytest.raises(SystemExit) as stop:
            main(["grade", *words])
        said = capfd.readouterr()
        return int(stop.value.code or 0), said.out, said.err

    yield run
    for signum, handler in zip(signals, before, strict=True):
        signal.signal(signum, handler)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 2, "Missing argument"),
        (["no-such.ipynb"], 2, "There is no no-such.ipynb."),
        (["{}"], 2, "There is no notebook in"),
        (["{}/x.txt", "--lab", "99"], 2, "There is no lab '99'; there are 07_small."),
        (["{}/x.txt", "{}/y.txt", "--gradescope", "g"], 2, "takes one notebook, not 2"),
        (["{}/x.txt", "--jobs", "0"], 2, "--jobs"),
        (["{}/x.txt", "--out", "{}/x.txt"], 1, "cannot be written"),
    ],
)
def test_wrong_words_are_answered_in_one_sentence(
    words: list[str], code: int, said: str, cli: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    for name in ("x.txt", "y.txt"):
        (tmp_path / name).write_text(name)
    ended, out, err = cli(*(word.format(tmp_path) for word in words))
    assert ended == code and said in err and out == ""
    assert len(err.strip().splitlines()) == 1 and err.startswith("rdmalab: ")


def test_where_there_are_no_labs_it_says_what_it_needs(
    cli: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    (tmp_path / "x.ipynb").write_text("{}")
    ended, _, err = cli(str(tmp_path), labs=tmp_path)
    assert ended == 1 and "RDMALAB_LABS" in err


def test_untouched_and_broken_ones_need_no_hosts(
    cli: Callable[..., tuple[int, str, str]], course: Course, tmp_path: Path
) -> None:
    """The whole command: a JSON document, the table, Gradescope's file."""
    folder, out, scope = (tmp_path / name for name in ("in", "out", "results.json"))
    folder.mkdir()
    hand_in(folder / "ada.ipynb", submission(course))
    (folder / "bob.ipynb").write_text("no JSON")
    ended, said, err = cli(str(folder), "--out", str(out), "--json")
    found = [(r["name"], r["score"], r["max_score"]) for r in json.loads(said)["results"]]
    assert ended == 0 and found == [("ada", 0, 5), ("bob", 0, 0)]
    assert re.search(r"[12] of 2: ada: 0 of 5 points", err), "either may be the first to be done"
    words = [str(folder / "ada.ipynb"), "--out", str(out), "--gradescope", str(scope)]
    ended, said, err = cli(*words)
    assert ended == 0 and "graded before" in err and "ada" in said
    assert json.loads(scope.read_text())["score"] == 0


class Slow:
    """A machine that counts who is open. It runs nothing."""

    started = 0

    def __init__(self, say: Callable[[str], None]) -> None:
        Slow.started += 1
        self.closed, self.number = False, Slow.started

    def close(self) -> None:
        self.closed = True

    def run(self, source: str, limits: Limits, *, ours: bool) -> Outcome:
        raise NotImplementedError

    def check(self, plan: CheckPlan, limits: Limits) -> Outcome:
        raise NotImplementedError


def test_the_next_machine_is_started_while_one_is_used_and_none_is_left() -> None:
    Slow.started = 0
    supply = Supply(3, print, Slow)
    for _ in range(3):
        supply.begun()
        machine = supply.fresh()
        if supply.ready is not None:
            supply.ready.result(timeout=10)
        assert Slow.started == min(machine.number + 1, 3), "one more, if there is one to come"
        machine.close()
    again = supply.fresh()  # for a submission that has ended its machine
    assert not again.closed
    supply.stop()
    assert all(machine.closed for machine in supply.open) and again.closed
    with pytest.raises(RdmalabError, match="interrupted"):
        supply.fresh()


def test_a_start_ahead_that_failed_is_tried_again_when_it_is_needed() -> None:
    failing = iter([False, True, False])

    def start(say: Callable[[str], None]) -> Slow:
        if next(failing):
            raise MachineError("no memory")
        return Slow(say)

    supply = Supply(1, print, start)
    supply.fresh()
    supply.begun()
    assert not supply.fresh().closed
    supply.stop()
