"""A lab of many small tasks on real hosts, so that one submission can do much harm at once.

Each task wants ``NAME = 1`` on alice, on bob or on the desk, and has one check with a hidden test.
"""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

from nbformat import NotebookNode

from rdmalab.grading.course import Course

LABS = Path(__file__).parents[2] / "labs"
NAME = "08_many"
STUB = "pass  # your lines go here"
CANARY = "canary-71520"

HEAD = """# %% [markdown]
# # Lab 08: Many

# %%
# %load_ext rdmalab
import rdmalab

lab = rdmalab.up()

# %%
# %%on alice bob
def well(value):
    \"\"\"Whether a value is the one that is wanted.\"\"\"
    return value == 1


# %%
def well(value):
    \"\"\"The same on the desk.\"\"\"
    return value == 1

"""

TASK = """
# %% [markdown]
# ### Task: {name} (1 point)

# %% task="{name}"
{on}{name} = None
### BEGIN SOLUTION
{name} = 1
### END SOLUTION

# %% check="{name}-value" points=1
{on}print(f"I looked at {name}: {{{name}!r}}.")
assert well({name}), "{name} is not what it should be."
### BEGIN HIDDEN TESTS
assert {name} != "{canary}", "It is the {canary}."
### END HIDDEN TESTS
assert {name} == 1, "{name} should be 1."
"""


def source(tasks: dict[str, str]) -> str:
    """The lab's source. ``tasks``: id -> host, or the empty string for the desk."""
    return HEAD + "\n".join(
        TASK.format(name=name, on=f"# %%on {host}\n" if host else "", canary=CANARY)
        for name, host in tasks.items()
    )


def make_course(folder: Path, tasks: dict[str, str]) -> Course:
    """The course of this one lab."""
    (folder / "source").mkdir(parents=True)
    (folder / "source" / f"{NAME}.py").write_text(source(tasks))
    shutil.copy(LABS / "build.py", folder)
    return Course(folder)


def answered(course: Course, answers: dict[str, str], name: str = NAME) -> NotebookNode:
    """A learner's notebook with these answers; each other task is answered right.

    An answer of ``None`` would leave a task alone: use :func:`as_handed_out`.
    """
    lab = course.lab(name)
    notebook = copy.deepcopy(lab.released)
    for cell in notebook.cells:
        if cell.get("id") in lab.tasks:
            cell.source = cell.source.replace(STUB, answers.get(cell.id, f"{cell.id} = 1"))
    return notebook


def solved(course: Course, name: str, tasks: list[str]) -> NotebookNode:
    """A learner's notebook in which these tasks are solved as the lab's author would."""
    lab = course.lab(name)
    notebook = copy.deepcopy(lab.released)
    right = {cell.id: cell.source for cell in lab.solved.cells if cell.cell_type == "code"}
    for cell in notebook.cells:
        if cell.get("id") in tasks:
            lines = right[cell.id].splitlines()
            cell.source = "\n".join(line for line in lines if not line.lstrip().startswith("###"))
    return notebook


def hand_in(file: Path, notebook: NotebookNode) -> Path:
    """Write a notebook as a learner's editor would."""
    file.write_text(json.dumps(notebook))
    return file
