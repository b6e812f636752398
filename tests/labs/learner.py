"""What the tests of the labs share: a lab's notebook, run as a learner or a grader runs it.

``run`` executes a whole notebook. ``attempts`` executes the solved one once and, at each task,
tries other answers: it runs the task's section (from its heading down) anew for each of them, as a
learner would after a wrong answer, and at last with the solution, which must then still get full
points. So all answers of a lab cost one pass, and what a wrong answer spoils for good is found.

``Retries`` are answers to one task that a learner tries one after the other without the cells that
come before the task: on what the try before has left.
"""

from __future__ import annotations

import asyncio
import copy
import importlib.util
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode
from nbgrader.utils import determine_grade, is_grade

import rdmalab
from rdmalab import lab as labs
from rdmalab.errors import HostDied

LABS = Path(__file__).parents[2] / "labs"
CELL_TIMEOUT_S = 300  # for hosts that are started on a busy machine, too


def load_build() -> ModuleType:
    """labs/build.py, which is a script and in no package."""
    spec = importlib.util.spec_from_file_location("labs_build", LABS / "build.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


build = load_build()


@contextmanager
def own_hosts(lab_id: str) -> Iterator[str]:
    """Hosts for one file's notebooks; the first notebook starts them, as a learner's would."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RDMALAB_LAB", lab_id)
        yield lab_id
    labs.down(lab_id)


def solved(name: str) -> NotebookNode:
    """The lab with solutions and hidden tests: ``solved("00_meet_your_hosts")``."""
    return build.solved(LABS / "source" / f"{name}.py")


def untouched(name: str) -> NotebookNode:
    """The lab as learners get it."""
    return build.release(solved(name))


def learners_folder(folder: Path) -> Path:
    """Lay into a folder what lies beside the notebooks; the folder."""
    shutil.copytree(LABS / "data", folder / "data")
    return folder


def client(notebook: NotebookNode, folder: Path) -> NotebookClient:
    return NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        allow_errors=True,
        resources={"metadata": {"path": str(folder)}},
    )


def run(notebook: NotebookNode, folder: Path) -> NotebookNode:
    """Execute a whole notebook in a fresh kernel, past errors; the notebook with its outputs."""
    return asyncio.run(client(notebook, folder).async_execute())  # execute() leaves a loop open


def errors(notebook: NotebookNode) -> dict[str, str]:
    """What each failed cell said: cell id -> text of the exception."""
    return {
        cell.id: output.evalue
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if output.output_type == "error"
    }


def printed(notebook: NotebookNode, cell_id: str = "", stream: str = "stdout") -> str:
    """What one cell, or all of them, wrote."""
    return "".join(
        output.text
        for cell in notebook.cells
        if cell.cell_type == "code" and cell_id in ("", cell.id)
        for output in cell.outputs
        if output.output_type == "stream" and output.name == stream
    )


def marks(notebook: NotebookNode) -> dict[str, float]:
    """The points that nbgrader gives: check id -> points."""
    return {cell.id: determine_grade(cell)[0] for cell in notebook.cells if is_grade(cell)}


def full_marks(name: str) -> dict[str, float]:
    """The points that nbgrader can give at most."""
    return {cell.id: determine_grade(cell)[1] for cell in solved(name).cells if is_grade(cell)}


def assert_solved(name: str, done: NotebookNode) -> None:
    """A solved lab that was run: no error, full points, no word on stderr, which costs points."""
    assert errors(done) == {}
    assert marks(done) == full_marks(name)
    assert printed(done, stream="stderr") == ""


def assert_runs_again(name: str, hosts: str, folder: Path, *, until: str) -> NotebookNode:
    """The solved lab passes on hosts that were left in the middle of it, a kernel of each killed.

    ``until``: the id, or a part of the source, of the first cell that is not run before it dies.
    After alice's death bob has what the first half left, and after bob's alice has what the second
    left. The last, whole pass is returned.
    """
    half = solved(name)
    middle = next(
        n for n, cell in enumerate(half.cells) if cell.id == until or until in cell.source
    )
    half.cells = half.cells[:middle]
    for victim in ("alice", "bob"):
        said = errors(run(half, folder))
        assert not said, said
        with pytest.raises(HostDied, match="SIGKILL"):
            rdmalab.up(lab=hosts)[victim].run("import os; os.kill(os.getpid(), 9)")
    done = run(solved(name), folder)
    assert_solved(name, done)
    return done


def assert_untouched(name: str, done: NotebookNode) -> None:
    """A lab that was run as handed out fails in each check, with a sentence of its own, only there.

    Each check has said before what it looked at, and no point is given.
    """
    said = errors(done)
    assert list(said) == list(full_marks(name))
    assert len(set(said.values())) == len(said)
    assert set(marks(done).values()) == {0}
    for check in said:
        assert printed(done, check), f"{check} does not say what it looked at"


# ---------------------------------------------------------------- right and wrong answers


@dataclass(frozen=True)
class Attempt:
    """An answer to a task.

    ``lines`` stand where the solution stood: one text, or one for each region when the task's cell
    has several. ``said``: for each check that must fail, a part of its sentence; empty for a right
    answer.
    """

    task: str
    title: str
    lines: str | Sequence[str]
    said: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:  # pytest shows it as the test's name
        return f"{self.task}: {self.title}"


ALONE, BELOW = "alone", "below"


@dataclass(frozen=True)
class Retries:
    """Answers to one task, each tried on what the one before has left.

    The first is tried with its whole section. Each further one is tried *alone*, which is the
    task's cell and its checks with nothing between them, and then *below*: all cells from the
    task's down to its last check.
    """

    answers: tuple[Attempt, ...]

    @property
    def task(self) -> str:
        return self.answers[0].task

    def steps(self) -> Iterator[tuple[Attempt, str]]:
        """What is run, in order: an answer, and which cells."""
        yield self.answers[0], ""
        for answer in self.answers[1:]:
            yield answer, ALONE
            yield answer, BELOW

    def key(self, number: int) -> str:
        """Under which name :func:`attempts` gives back what step ``number`` did."""
        return f"{self}, step {number}"

    def __str__(self) -> str:
        return f"{self.task}: " + ", then ".join(answer.title for answer in self.answers)


def retries(tries: Sequence[Attempt]) -> list[Retries]:
    """For each task: a wrong answer, then a right one, then the wrong one once more."""
    found = []
    for task in dict.fromkeys(attempt.task for attempt in tries):
        mine = [attempt for attempt in tries if attempt.task == task]
        wrong = next(attempt for attempt in mine if attempt.said)
        right = next(attempt for attempt in mine if not attempt.said)
        found.append(Retries((wrong, right, wrong)))
    return found


def filled(cell: NotebookNode, attempt: Attempt) -> str:
    """The source of a task's released cell with the attempt's lines in place of the stubs."""
    answers = [attempt.lines] if isinstance(attempt.lines, str) else list(attempt.lines)
    text = []
    for line in cell.source.splitlines():
        if build.STUB not in line:
            text.append(line)
            continue
        indent = line[: line.index(build.STUB)]
        text += [indent + own if own else own for own in answers.pop(0).splitlines()]
    assert not answers, f"{attempt}: more answers than regions"
    return "\n".join(text)


def section(notebook: NotebookNode, task: str, begin: str = "") -> list[int]:
    """The numbers of the cells of a task's section: from its heading to the next heading.

    ``begin``: an earlier heading from which a learner is told to run again, such as ``"## 4"``.
    """
    (at,) = (n for n, cell in enumerate(notebook.cells) if cell.id == task)
    heads = [
        n
        for n, cell in enumerate(notebook.cells)
        if cell.cell_type == "markdown" and cell.source.startswith("#")
    ]
    start = max(n for n in heads if n < at and notebook.cells[n].source.startswith(begin or "#"))
    end = min((n for n in heads if n > at), default=len(notebook.cells))
    return list(range(start, end))


def chosen(notebook: NotebookNode, task: str, how: str, begin: str = "") -> list[int]:
    """The numbers of the cells that a try runs; ``how``: see :class:`Retries`, "" for all.

    Where a learner is told to ``begin`` at an earlier heading, that is what *below* means.
    """
    numbers = section(notebook, task, begin)
    cells = notebook.cells
    at = next(n for n in numbers if cells[n].id == task)
    checks = [n for n in numbers if n > at and is_grade(cells[n])]
    if how == ALONE:
        return [at, *checks]
    return list(range(at, checks[-1] + 1)) if how == BELOW and not begin else numbers


def attempts(
    name: str,
    tries: Sequence[Attempt | Retries],
    folder: Path,
    begin: dict[str, str],
) -> dict[str, NotebookNode]:
    """One pass through the solved lab with all `tries`: text of the attempt -> its section, run.

    The entry "" is the solved lab itself, run around all of these. ``begin``: see :func:`section`,
    by task.
    """
    steps = [
        (key, answer, how)
        for attempt in tries
        for key, answer, how in (
            [(attempt.key(n), *step) for n, step in enumerate(attempt.steps())]
            if isinstance(attempt, Retries)
            else [(str(attempt), attempt, "")]
        )
    ]
    notebook = solved(name)
    empty = {cell.id: cell for cell in build.release(notebook).cells}
    done: dict[str, NotebookNode] = {"": notebook}

    async def all_cells() -> None:
        runner = client(notebook, folder)
        async with runner.async_setup_kernel():
            for number, cell in enumerate(notebook.cells):
                for key, attempt, how in steps:
                    first = begin.get(attempt.task, "")
                    if section(notebook, attempt.task, first)[0] != number:
                        continue
                    numbers = chosen(notebook, attempt.task, how, first)
                    part = copy.deepcopy(notebook)
                    part.cells = [part.cells[n] for n in numbers]
                    runner.nb = part  # into which the client puts each cell that it has run
                    shown = runner._display_id_map  # where a live picture is to be drawn anew
                    runner._display_id_map = {}
                    for at, inner in enumerate(part.cells):
                        if inner.id == attempt.task:
                            inner.source = filled(empty[inner.id], attempt)
                        if inner.cell_type == "code":
                            await runner.async_execute_cell(inner, at)
                    runner.nb, runner._display_id_map = notebook, shown
                    done[key] = part
                await runner.async_execute_cell(cell, number)

    asyncio.run(all_cells())
    return done


def selected(
    request: pytest.FixtureRequest, tries: Sequence[Attempt | Retries]
) -> list[Attempt | Retries]:
    """The attempts whose tests are to run: nobody waits for answers that no test looks at."""
    chosen = set()
    for item in request.session.items:
        call = getattr(item, "callspec", None)
        if call is not None and "attempt" in call.params:
            chosen.add(str(call.params["attempt"]))
    return [attempt for attempt in tries if str(attempt) in chosen]


def judge(attempt: Attempt, part: NotebookNode) -> None:
    """Assert that a tried section failed where it should, with the sentences it should say."""
    said = errors(part)
    assert list(said) == list(attempt.said), said
    for check, sentence in attempt.said.items():
        assert sentence in said[check]
    assert {check for check, points in marks(part).items() if points == 0} == set(attempt.said)


def judge_retries(tried: Retries, done: dict[str, NotebookNode]) -> None:
    """Assert that no try was judged by what another has left.

    Alone, a wrong answer gets no point that it does not get on fresh ground. A right one passes, or
    the first thing that it is told is what to run again; and when that is done, it passes.
    """
    for number, (answer, how) in enumerate(tried.steps()):
        part = done[tried.key(number)]
        if how != ALONE:
            judge(answer, part)
            continue
        said = errors(part)
        assert set(said) <= {cell.id for cell in part.cells if is_grade(cell)}, said
        assert not set(answer.said) - set(said), f"passes on leftovers: {answer}, {said}"
        first = next((text for check, text in said.items() if check not in answer.said), "again")
        assert "again" in first, f"right, but {said}"
