"""A course of one small lab, and a machine for it that is a Python process: no hosts are needed.

The process is real, so a cell can really end it, hang, or print without end.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import multiprocessing
import shutil
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from nbformat import NotebookNode

from rdmalab.grading.course import Course
from rdmalab.grading.plans import CheckPlan
from rdmalab.grading.results import Outcome
from rdmalab.grading.runner import Limits

LABS = Path(__file__).parents[2] / "labs"
NAME = "07_small"
STUB = "pass  # your lines go here"
CANARY = "canary-60317"

SOURCE = f'''# %% [markdown]
# # Lab 07: Small

# %%
def looked(value):
    """Say what was looked at."""
    print(f"I looked at {{value!r}}.")
    return value

# %% [markdown]
# ### Task 1: double (3 points)

# %% task="double"
def double(x):
    ### BEGIN SOLUTION
    return 2 * x
    ### END SOLUTION

# %% check="double-small" points=1
assert looked(double(3)) == 6, "Twice three is six."

# %% check="double-large" points=2
assert looked(double(100)) == 200, "Twice a hundred is two hundred."
### BEGIN HIDDEN TESTS
assert double("{CANARY}") == "{CANARY}{CANARY}", "The {CANARY} is not there twice."
### END HIDDEN TESTS
assert double(1) == 2, "Twice one is two."

# %%
looked("what is between the tasks")

# %% [markdown]
# ### Task 2: halve (2 points)

# %% task="halve"
half = None
### BEGIN SOLUTION
half = 21
### END SOLUTION

# %% check="halve-value" points=2
print("I looked at half.")
assert half == 21, "Half of 42 is something else."
'''


def make_course(folder: Path) -> Course:
    """The course in a folder."""
    (folder / "source").mkdir(parents=True)
    (folder / "source" / f"{NAME}.py").write_text(SOURCE)
    shutil.copy(LABS / "build.py", folder)
    return Course(folder)


def submission(course: Course, **answers: str) -> NotebookNode:
    """A learner's notebook, with these lines for answers."""
    notebook = copy.deepcopy(course.lab(NAME).released)
    for cell in notebook.cells:
        if cell.id in answers:
            cell.source = cell.source.replace(STUB, answers[cell.id])
    return notebook


def hand_in(file: Path, notebook: NotebookNode) -> Path:
    """Write a notebook as a learner's editor would."""
    file.write_text(json.dumps(notebook))
    return file


SOLVED = {"double": "return 2 * x", "halve": "half = 21"}


def serve(pipe: Connection) -> None:
    """The process: runs what comes, and says how it ended and what it printed."""
    space: dict[str, Any] = {}
    while True:
        source, apart = pipe.recv()
        out, ended, why = io.StringIO(), "ok", ""
        with contextlib.redirect_stdout(out):
            try:
                exec(source, {**space} if apart else space)
            except AssertionError as error:
                ended, why = "raised", str(error)
            except Exception as error:
                ended, why = "raised", f"{type(error).__name__}: {error}"
        pipe.send((ended, why, out.getvalue()[:4000]))


class ProcessMachine:
    """One Python process for desk and checks. A cell that it does not survive is ``lost``."""

    started = 0

    def __init__(self, say: Any = None) -> None:
        type(self).started += 1
        self.closed = False
        self.pipe, theirs = multiprocessing.Pipe()
        fork = multiprocessing.get_context("fork")
        self.process = fork.Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def run(self, source: str, limits: Limits, *, ours: bool) -> Outcome:
        return self.ask(source, False, limits)

    def check(self, plan: CheckPlan, limits: Limits) -> Outcome:
        return self.ask(f"{plan.briefs[''].given}\n{plan.source}", True, limits)

    def ask(self, source: str, apart: bool, limits: Limits) -> Outcome:
        try:
            self.pipe.send((source, apart))
            if not self.pipe.poll(limits.cell_s):
                self.close()
                return Outcome("lost", f"did not finish within {limits.cell_s:g} s.")
            return Outcome(*self.pipe.recv(), seconds=0.01)
        except (EOFError, OSError):
            self.process.join(5)
            return Outcome("lost", f"ended its kernel (exit code {self.process.exitcode}).")

    def close(self) -> None:
        self.closed = True
        self.process.kill()
        self.process.join(5)
        self.pipe.close()
