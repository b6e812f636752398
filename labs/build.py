#!/usr/bin/env python3
"""Build the notebooks of this folder from their sources.

    python labs/build.py                every labs/NN_slug.ipynb, the form for learners
    python labs/build.py --check        write nothing; exit 1 when a notebook is out of date
    python labs/build.py --solved DIR   the form with solutions and hidden tests, into DIR
    python labs/build.py --course       labs/course/source/, from which nbgrader makes assignments

A source is a Python file in jupytext's percent format.  The marks behind `# %%` are described in
labs/README.md.  Each source goes through the same small steps:

    read -> inspect -> stamp = solved form -> nbgrader's own release steps = learner's form -> text

The same source always gives the same bytes, so that CI can rebuild and compare.
"""

from __future__ import annotations

import argparse
import ast
import copy
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import jupytext
import nbformat
from IPython.core.inputtransformer2 import TransformerManager
from nbformat import NotebookNode
from nbgrader import preprocessors as steps

LABS = Path(__file__).resolve().parent
MAX_LINES = 15  # of a code cell, as a learner sees it: one idea a cell
STUB = "pass  # your lines go here"  # harmless: an untouched task fails in its check, not before

REGION = re.compile(r"\s*### (BEGIN|END) (SOLUTION|HIDDEN TESTS)\s*")
# What a region mark could look like when it is mistyped; nbgrader would let such a line through.
LIKE_A_REGION = re.compile(r"(begin|end)\W*(solution|hidden)|hidden\W*test", re.IGNORECASE)
GRADE_ID = re.compile(r"[a-z][a-z0-9-]{1,40}")
ALLOWED_REGION = {"task": "SOLUTION", "check": "HIDDEN TESTS"}

KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
LANGUAGE = {"file_extension": ".py", "mimetype": "text/x-python", "name": "python"}


class LabError(ValueError):
    """A source that must not become a notebook; says which file, which cell and what to change."""


def sources(labs: Path = LABS) -> list[Path]:
    """The sources of all labs, in teaching order."""
    return sorted((labs / "source").glob("[0-9][0-9]_*.py"))


def read(source: Path) -> NotebookNode:
    """The notebook that jupytext sees in `source`; marks are still raw cell metadata."""
    notebook = jupytext.read(source, fmt="py:percent")
    for cell in notebook.cells:
        cell.metadata.pop("lines_to_next_cell", None)
    return notebook


def role(cell: NotebookNode) -> str:
    """`prose`, `run`, `task`, `check` or `hide`: what the mark on a cell makes of it."""
    marks = cell.metadata
    match cell.cell_type, sorted(marks):
        case "markdown", []:
            return "prose"
        case "code", []:
            return "run"
        case "code", ["task"]:
            return "task"
        case "code", ["check", "points"] if type(marks.points) is int and marks.points > 0:
            return "check"
        case "code", ["hide"] if marks.hide == "input":
            return "hide"
    shown = " ".join(f"{key}={value!r}" for key, value in sorted(marks.items()))
    raise LabError(
        f'unknown mark {shown or cell.cell_type!r}. Known are [markdown], task="ID", '
        'check="ID" points=N and hide="input". (A body line that begins with "# %% " also '
        "starts a cell: write it differently.)"
    )


def regions(text: str) -> Iterator[tuple[str, str]]:
    """Yield `(kind, line)` for each line; kind is the region it lies in, `mark`, or empty."""
    inside = ""
    for line in text.splitlines():
        found = REGION.fullmatch(line)
        if not found:
            if LIKE_A_REGION.search(line):
                raise LabError(f"{line.strip()!r} looks like a region mark but is not one")
            yield inside, line
            continue
        edge, kind = found.groups()
        if (edge == "BEGIN") == bool(inside) or (edge == "END" and kind != inside):
            raise LabError(f"{line.strip()!r} is out of balance: each BEGIN needs its own END")
        inside = kind if edge == "BEGIN" else ""
        yield "mark", line
    if inside:
        raise LabError(f"BEGIN {inside} has no END {inside}")


def inspect_regions(cell: NotebookNode) -> None:
    """Refuse regions that are unbalanced, in the wrong cell, or missing from a task."""
    kind = role(cell)
    found = {region for region, _ in regions(cell.source)} - {"", "mark"}
    allowed = ALLOWED_REGION.get(kind)
    for region in found - {allowed}:
        raise LabError(f"a {region} region does not belong into a {kind} cell")
    if kind == "task" and not found:
        raise LabError("a task needs a region '### BEGIN SOLUTION' ... '### END SOLUTION'")


def inspect_code(cell: NotebookNode) -> None:
    """Refuse code that is too long, misplaces a cell magic, or does not parse."""
    lines = [line for region, line in regions(cell.source) if region in ("", "SOLUTION")]
    if len(lines) > MAX_LINES:
        raise LabError(f"{len(lines)} lines; a code cell has at most {MAX_LINES}: split it")
    if any(re.match(r"\s*(#\s*)?%%", line) for line in lines[1:]):
        raise LabError("only the first line of a cell may begin with '%%' (%%on) or '# %%'")
    if any(line.lstrip().startswith("###") for line in lines):
        raise LabError("'###' begins region marks only; this one is none of them")
    for form in (cell.source, "\n".join(lines)):
        last = ([None] + parse(form))[-1]
        if role(cell) == "check" and not isinstance(last, ast.Assert):
            raise LabError("a check must end with an assert, without its hidden part, too")


def parse(text: str) -> list[ast.stmt]:
    """The statements of a cell, magics and shell lines translated as IPython would."""
    first, _, rest = text.partition("\n")
    if first.startswith("%%"):
        text = rest if first.startswith("%%on ") else ""
    try:
        return ast.parse(TransformerManager().transform_cell(text)).body
    except SyntaxError as error:
        raise LabError(
            f"not valid Python ({error.msg}): did a body line that begins with '# %%' split it?"
        ) from None


def inspect_ids(notebook: NotebookNode) -> None:
    """Refuse ids that are malformed or used twice, and tasks and checks without each other."""
    seen: set[str] = set()
    task, checked = "", True
    for cell in notebook.cells:
        kind = role(cell)
        if kind not in ALLOWED_REGION:
            continue
        name = cell.metadata[kind]
        if not GRADE_ID.fullmatch(str(name)) or name in seen:
            raise LabError(f"id {name!r} is used twice, or is not lower-case letters and hyphens")
        if kind == "check" and not name.startswith(f"{task}-"):
            raise LabError(f"check {name!r} must stand under its task and be named {task}-...")
        if kind == "task" and not checked:
            break
        seen.add(name)
        task, checked = (name, False) if kind == "task" else (task, True)
    if not checked:
        raise LabError(f"task {task!r} has no check under it")


def inspect(notebook: NotebookNode) -> None:
    """Refuse a source that would leak, confuse or lose marks; `LabError` names the cell."""
    for number, cell in enumerate(notebook.cells, start=1):
        try:
            inspect_regions(cell)
            if cell.cell_type == "code":
                inspect_code(cell)
        except LabError as error:
            first = cell.source.partition("\n")[0]
            raise LabError(f"cell {number} ({first[:50]!r}): {error}") from None
    inspect_ids(notebook)


def add_private(notebook: NotebookNode, private: Path) -> None:
    """Put an instructor's own hidden tests, which no public repository holds, behind the checks.

    `private` is written like a source and has cells `# %% check="ID"` only, each named after a
    check of the lab; its lines become one more hidden region of that check.
    """
    if not private.exists():
        return
    checks = {cell.metadata.get("check"): cell for cell in notebook.cells}
    for cell in read(private).cells:
        name = cell.metadata.get("check")
        if cell.cell_type != "code" or name not in checks or name is None:
            raise LabError(f"private/{private.name} has a cell that names no check of this lab")
        lines = cell.source.removeprefix(checks[name].source.partition("\n")[0] + "\n")
        if any(region for region, _ in regions(lines)):
            raise LabError(f"private/{private.name}, {name}: all of it is hidden; leave out marks")
        checks[name].source += f"\n### BEGIN HIDDEN TESTS\n{lines}\n### END HIDDEN TESTS"


def graded(name: str, **fields: object) -> dict[str, object]:
    """nbgrader's cell metadata, schema 3."""
    plain = {"grade": False, "locked": False, "solution": False, "task": False}
    return {"nbgrader": {"grade_id": name, "schema_version": 3, **plain, **fields}}


def stamp(cell: NotebookNode, number: int) -> None:
    """Turn the mark on `cell` into notebook metadata, and give it an id that stays the same."""
    kind, marks = role(cell), cell.metadata
    cell.id = marks[kind] if kind in ALLOWED_REGION else f"cell-{number:03d}"
    cell.metadata = NotebookNode()
    if kind == "task":
        cell.metadata.update(graded(cell.id, solution=True))
    elif kind == "check":
        cell.metadata.update(graded(cell.id, grade=True, locked=True, points=marks["points"]))
    elif kind == "hide":
        cell.metadata.update({"jupyter": {"source_hidden": True}, "tags": ["hide-input"]})


def solved(source: Path) -> NotebookNode:
    """The notebook of `source` with solutions and hidden tests: for instructors and for tests.

    Raises:
        LabError: naming the file, the cell and what to change.
    """
    notebook = read(source)
    try:
        add_private(notebook, source.parent.parent / "private" / source.name)
        inspect(notebook)
        for number, cell in enumerate(notebook.cells, start=1):
            stamp(cell, number)
    except LabError as error:
        raise LabError(f"{source.name}: {error}") from None
    kit = {"lab": source.stem}  # by which grading knows a submission, whatever its file is called
    notebook.metadata = nbformat.from_dict(
        {"kernelspec": KERNEL, "language_info": LANGUAGE, "rdmalab": kit}
    )
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def release(notebook: NotebookNode) -> NotebookNode:
    """The learner's form: cells locked, solutions, outputs and hidden tests removed."""
    student = copy.deepcopy(notebook)
    for step in (
        steps.LockCells(),
        steps.ClearSolutions(code_stub={"python": STUB}),
        steps.ClearOutput(),
        steps.ClearHiddenTests(),
        steps.ComputeChecksums(),
    ):
        student, _ = step.preprocess(student, {})
    for cell in student.cells:
        if cell.cell_type == "code":
            parse(cell.source)
    return student


def text_of(notebook: NotebookNode) -> str:
    """The text of a notebook file: sorted keys, one final newline."""
    nbformat.validate(notebook)
    return nbformat.writes(notebook) + "\n"


def stale(labs: Path = LABS) -> dict[Path, str]:
    """Notebooks that differ from what their sources give, each with the text it should have."""
    wanted = {
        labs / f"{source.stem}.ipynb": text_of(release(solved(source))) for source in sources(labs)
    }
    return {
        path: text
        for path, text in wanted.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    }


def build(labs: Path = LABS) -> list[Path]:
    """Write each stale notebook; returns those written."""
    changed = stale(labs)
    for path, text in changed.items():
        path.write_text(text, encoding="utf-8")
    return list(changed)


def write_solved(folder: Path, labs: Path = LABS) -> None:
    """Write every solved notebook, and the pictures, to `folder`."""
    if folder.resolve().is_relative_to(labs.resolve()):
        raise LabError(f"{folder} is where learners look: choose a folder outside labs/")
    folder.mkdir(parents=True, exist_ok=True)
    for beside in ("images", "data"):  # what the notebooks show and read
        if (labs / beside).is_dir():
            shutil.copytree(labs / beside, folder / beside, dirs_exist_ok=True)
    for source in sources(labs):
        (folder / f"{source.stem}.ipynb").write_text(text_of(solved(source)), encoding="utf-8")


def write_course(labs: Path = LABS) -> Path:
    """Write nbgrader's source folder: an assignment for each lab, with the files that it shows.

    nbgrader copies all files of an assignment to learners, so the sources stay where they are.
    """
    folder = labs / "course" / "source"
    for source in sources(labs):
        place, text = folder / source.stem, text_of(solved(source))
        place.mkdir(parents=True, exist_ok=True)
        for beside in [*labs.glob("images/*"), *labs.glob("data/*")]:
            name = beside.relative_to(labs)
            if str(name) in text:
                (place / name).parent.mkdir(exist_ok=True)
                shutil.copy(beside, place / name)
        (place / f"{source.stem}.ipynb").write_text(text, encoding="utf-8")
    return folder


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Build the lab notebooks from their sources.")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--check", action="store_true", help="only compare; exit 1 when stale")
    choice.add_argument("--course", action="store_true", help="write nbgrader's source folder")
    choice.add_argument("--solved", metavar="DIR", type=Path, help="write the solved form to DIR")
    parser.add_argument("--labs", type=Path, default=LABS, help="the folder that holds source/")
    options = parser.parse_args(arguments)
    try:
        if options.solved:
            write_solved(options.solved, options.labs)
        elif options.course:
            print(f"wrote {write_course(options.labs)}")
        elif options.check:
            for path in (out_of_date := stale(options.labs)):
                print(f"{path.name} is out of date: run `python labs/build.py` and commit it")
            return 1 if out_of_date else 0
        else:
            for path in build(options.labs):
                print(f"wrote {path.name}")
    except LabError as error:
        print(f"build.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
