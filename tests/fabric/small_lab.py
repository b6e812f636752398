"""A lab that takes a second: three tasks, in the notebook, on alice and on bob, each with a check.

Its hidden tests say CANARY, which no learner may ever read.
"""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

from nbformat import NotebookNode

from rdmalab.grading.course import Course, LabForms

__all__ = ["ANSWERS", "NAME", "POINTS", "answered", "labs_with_it"]

LABS = Path(__file__).parents[2] / "labs"
NAME = "90_small"
POINTS = {"sum-value": 2.0, "greeting-text": 1.0, "echo-text": 3.0}
ANSWERS = {
    "sum": "total = 40 + 2",
    "greeting": 'import socket\n\ngreeting = "hello from " + socket.gethostname()',
    "echo": 'echo = "I am " + here.name',
}
SOURCE = f"""\
# %% [markdown]
# # Lab 90: A small one
#
# ![Drawing. A host, as the labs draw it, so that a picture travels along.](images/00_two_hosts.svg)

# %%
# %load_ext rdmalab
import rdmalab

lab = rdmalab.up()

# %% [markdown]
# ### Task 1: a sum (2 points)

# %% task="sum"
total = None
### BEGIN SOLUTION
{ANSWERS["sum"]}
### END SOLUTION

# %% check="sum-value" points=2
print(f"I looked at `total`, which is {{total}}.")
assert total is not None, "`total` is still None: nothing was added."
### BEGIN HIDDEN TESTS
assert total == 42, "CANARY one: it is forty-two."
### END HIDDEN TESTS
assert isinstance(total, int), "`total` should be a whole number."

# %% [markdown]
# ### Task 2: a greeting (1 point)

# %% task="greeting"
# %%on alice
greeting = None
### BEGIN SOLUTION
{ANSWERS["greeting"]}
### END SOLUTION

# %% check="greeting-text" points=1
# %%on alice
print("I looked at alice's `greeting`.")
assert greeting is not None, "`greeting` is still None: alice says nothing."
assert greeting == "hello from alice", f"Alice says {{greeting!r}}."

# %% [markdown]
# ### Task 3: an echo (3 points)

# %% task="echo"
# %%on bob
from rdmalab import here

echo = None
### BEGIN SOLUTION
{ANSWERS["echo"]}
### END SOLUTION

# %% check="echo-text" points=3
# %%on bob
print("I looked at bob's `echo`.")
assert echo is not None, "`echo` is still None: bob is silent."
### BEGIN HIDDEN TESTS
assert echo == "I am bob", f"CANARY two: {{echo}}"
### END HIDDEN TESTS
assert isinstance(echo, str), "`echo` should be a text."
"""


def labs_with_it(folder: Path) -> LabForms:
    """Make ``folder`` a folder of labs with this one only."""
    (folder / "source").mkdir(parents=True)
    (folder / "source" / f"{NAME}.py").write_text(SOURCE)
    for name in ("build.py", "nbgrader_config.py"):
        if (LABS / name).exists():
            shutil.copy(LABS / name, folder)
    (folder / "images").mkdir()
    shutil.copy(LABS / "images" / "00_two_hosts.svg", folder / "images")
    course = Course(folder)
    course.build.build(folder)
    return course.lab(NAME)


def answered(lab: LabForms, answers: dict[str, str]) -> NotebookNode:
    """The lab as handed out, with some tasks answered."""
    notebook = copy.deepcopy(lab.released)
    for cell in notebook.cells:
        if cell.id in answers:
            cell.source = cell.source.replace("pass  # your lines go here", answers[cell.id])
    return notebook
