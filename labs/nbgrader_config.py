"""nbgrader's settings for these labs. docs/instructors.md tells how a course goes.

nbgrader reads this file when it, or JupyterLab, is started in this folder (`rdmalab lab` is).
Each line closes a way in which marks get lost, are given away, or hidden tests get out.
"""

from pathlib import Path

from nbconvert.preprocessors import CSSHTMLHeaderPreprocessor
from nbgrader.preprocessors import (
    AssignLatePenalties,
    ClearHiddenTests,
    GetGrades,
    LimitOutput,
    SaveAutoGrades,
)

from rdmalab.grading import gradebook
from rdmalab.grading.runner import Limits

c = get_config()  # noqa: F821  # nbgrader puts it there
gradebook.find_programs()

# --- Where a course lives: apart from the labs' sources, since nbgrader hands out every file that
# it finds beside an assignment's notebook. `python labs/build.py --course` fills course/source/.
c.CourseDirectory.root = str(Path(__file__).resolve().parent / "course")
c.CourseDirectory.ignore = [
    ".ipynb_checkpoints",
    "__pycache__",
    "*.py",  # a source has the solutions
    "*.pyc",
    "feedback",
    ".*",
]

# --- What learners get. The same harmless line in place of a solution as in labs/*.ipynb: an
# untouched task fails in its check and not before.
c.ClearSolutions.code_stub = {"python": "pass  # your lines go here"}
c.ClearSolutions.enforce_metadata = True

# --- Autograde: `rdmalab grade`'s sandbox. nbgrader opens no submitted file and runs none.
c.Autograde.pre_convert_hook = gradebook.without_links
c.Autograde.exporter_class = gradebook.Unread
c.Autograde.sanitize_preprocessors = []
c.Autograde.autograde_preprocessors = [
    gradebook.Sandbox,
    LimitOutput,
    SaveAutoGrades,
    AssignLatePenalties,
]
c.LimitOutput.max_lines = 200
c.LimitOutput.max_traceback = 20

# --- Feedback: there is no hidden test in what it is made of; if ever there were, it ends here.
c.GenerateFeedback.preprocessors = [GetGrades, ClearHiddenTests, CSSHTMLHeaderPreprocessor]

# --- The Validate button runs the learner's own notebook on the learner's own machine, with hosts
# of its own. nbgrader's 30 s are too few for emulated hosts.
c.Execute.timeout = int(Limits().cell_s)
c.Execute.startup_timeout = 120
c.Execute.interrupt_on_timeout = True

# --- If somebody takes nbgrader's own preprocessors back: a deleted test must not vanish silently.
c.OverwriteCells.add_missing_cells = True
