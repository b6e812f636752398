"""A submitted notebook, read without trusting a byte of it, and put into order again.

Learners delete, copy, move and edit cells; other editors rename the file and drop what they do not
know. So nothing of a submission is run as it stands: :func:`restore` takes the lab's own cells in
the lab's own order, puts in what the learner was to write, and keeps the learner's other cells
beside the cell that they stood behind. What was found amiss is said in :attr:`Restored.notes`.
"""

from __future__ import annotations

import difflib
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

from ..errors import UsageError

__all__ = ["LARGEST_BYTES", "Restored", "Step", "read", "restore", "sources_of"]

PARSING = threading.Lock()
LARGEST_BYTES = 20 << 20  # of a submitted file; a lab's notebook has less than 0.1 MB
LIKE = 0.6  # how much of a given cell must be left for it to be that cell (difflib's ratio)


@dataclass(frozen=True)
class Step:
    """One code cell to run. ``kind``: ``given``, ``task``, ``check`` or ``own`` (the learner's).

    ``changed``: whether its source is the learner's and not the lab's.
    """

    id: str
    kind: str
    source: str
    changed: bool = False


@dataclass
class Restored:
    """What is run for a submission, and what was amiss with it, in sentences."""

    steps: list[Step] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read(path: Path) -> NotebookNode:
    """The notebook in a file. :class:`UsageError` says in one sentence why it is none."""
    try:
        size = path.stat().st_size
        if size > LARGEST_BYTES:
            raise UsageError(
                f"{path.name} has {size >> 20} MB; a submission may have {LARGEST_BYTES >> 20}.",
                next_step="Clear all outputs (Kernel, Restart and clear), save, submit again.",
            )
        notebook = parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}).") from None
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{path.name} is no notebook ({type(error).__name__}).",
            next_step="Submit the .ipynb file as JupyterLab saves it.",
        ) from None
    cells = notebook.get("cells")
    if not isinstance(cells, list) or not all(isinstance(cell, dict) for cell in cells):
        raise UsageError(f"{path.name} is no notebook (it has no list of cells).")
    if not any(cell.get("cell_type") == "code" for cell in cells):
        raise UsageError(f"{path.name} has no code cells: nothing can be graded.")
    return notebook


def parse(text: str) -> NotebookNode:
    """A notebook's text as nbformat reads it, which warns of much that does no harm here."""
    with PARSING, warnings.catch_warnings():  # the filters are the whole process's
        warnings.simplefilter("ignore")
        # nbformat has no types
        notebook: NotebookNode = nbformat.reads(text, as_version=4)  # type: ignore[no-untyped-call]
    return notebook


def sources_of(notebook: NotebookNode) -> Iterator[NotebookNode]:
    """The code cells of a notebook, with a text for a source, whatever they had for it."""
    for cell in notebook.cells:
        if cell.get("cell_type") == "code":
            source = cell.get("source", "")
            cell.source = "".join(source) if isinstance(source, list) else str(source)
            yield cell


def grade_id(cell: NotebookNode) -> str:
    """The name that nbgrader's metadata give a cell, or the empty string."""
    metadata: Any = cell.get("metadata") or {}
    found: Any = metadata.get("nbgrader") if isinstance(metadata, dict) else None
    name: Any = found.get("grade_id") if isinstance(found, dict) else None
    return name if isinstance(name, str) else ""


def kind_of(cell: NotebookNode) -> str:
    """``task``, ``check`` or ``given``: what a cell of the lab's own is."""
    found = cell.metadata.get("nbgrader", {})
    return "task" if found.get("solution") else "check" if found.get("grade") else "given"


def plain(source: str) -> str:
    """A source without what editors change by themselves: line ends, blanks at ends of lines."""
    return "\n".join(line.rstrip() for line in source.strip().splitlines())


class Matcher:
    """Finds, for each cell of a submission, which of the lab's cells it is."""

    def __init__(self, released: NotebookNode) -> None:
        self.cells = {cell.id: cell for cell in sources_of(released)}
        self.by_text: dict[str, list[str]] = {}
        for name, cell in self.cells.items():
            self.by_text.setdefault(plain(cell.source), []).append(name)

    def find(self, cell: NotebookNode, taken: Sequence[str] = ()) -> str:
        """The id of the lab's cell that this one is, or the empty string.

        Where a lab has the same cell twice it is the one of its id, or the next that is not
        ``taken`` by the cells before this one.
        """
        name = grade_id(cell)
        if name in self.cells:
            return name
        same = self.by_text.get(plain(cell.source), [])
        name = cell.get("id", "")
        if same and name not in same:
            return next((other for other in same if other not in taken), same[-1])
        if name in self.cells and (same or self.alike(name, cell.source)):
            return str(name)
        return ""

    def alike(self, name: str, source: str) -> bool:
        """Whether a source is still recognisably that cell's."""
        given = plain(self.cells[name].source)
        return difflib.SequenceMatcher(None, given, plain(source), autojunk=False).ratio() >= LIKE

    def nearest(self, missing: Sequence[str], source: str) -> str:
        """Which missing task a cell without any mark must be, by its first lines; or none.

        Editors that drop metadata leave the text: a task's cell begins as it was handed out.
        """
        for name in missing:
            head = plain(self.cells[name].source.partition("pass  #")[0]).splitlines()
            mine = plain(source).splitlines()
            if head and mine[: len(head)] == head:
                return name
        return ""


def restore(submitted: NotebookNode, lab: NotebookNode, released: NotebookNode) -> Restored:
    """The steps to run for a submission.

    ``lab``: the notebook with solutions and hidden tests; ``released``: as it was handed out.
    Checks are always the lab's own, with their hidden tests; a task that is missing is the
    untouched one.
    """
    matcher = Matcher(released)
    found, own, notes = sort_out(list(sources_of(submitted)), matcher)
    result = Restored(notes=notes)
    result.steps += own.get("", [])
    for cell in sources_of(lab):
        kind, mine = kind_of(cell), found.get(cell.id)
        given = matcher.cells[cell.id].source
        if kind == "check":
            result.steps.append(Step(cell.id, kind, cell.source))
            if mine is None:
                notes.append(f"The check {cell.id} was missing; it was put back.")
            elif plain(mine) != plain(given):
                notes.append(f"The check {cell.id} had been edited; the lab's own was run.")
        elif mine is None:
            result.steps.append(Step(cell.id, kind, given))
            if kind == "task":
                notes.append(f"The answer to {cell.id} was missing.")
        else:
            result.steps.append(Step(cell.id, kind, mine, plain(mine) != plain(given)))
        result.steps += own.get(cell.id, [])
    return result


def sort_out(
    cells: Sequence[NotebookNode], matcher: Matcher
) -> tuple[dict[str, str], dict[str, list[Step]], list[str]]:
    """Which of the submission's cells are the lab's, and which are the learner's own.

    Returns the sources by the lab's cell ids; the own cells by the id that they stand behind; and
    what is to be said about it.
    """
    names: list[str] = []
    for cell in cells:
        names.append(matcher.find(cell, names))
    tasks = [name for name, cell in matcher.cells.items() if kind_of(cell) == "task"]
    for number, cell in enumerate(cells):
        if not names[number]:
            missing = [name for name in tasks if name not in names]
            names[number] = matcher.nearest(missing, cell.source)
    found: dict[str, str] = {}
    own: dict[str, list[Step]] = {}
    notes: list[str] = []
    behind = ""
    for number, (name, cell) in enumerate(zip(names, cells, strict=True)):
        if not name:
            own.setdefault(behind, []).append(Step(f"own-{number}", "own", cell.source, True))
        elif name in found:
            notes.append(f"The cell {name} stands there more than once.")
            found[name] = better(found[name], cell.source, matcher.cells[name].source)
        else:
            found[name] = cell.source
        behind = name or behind
    order = [name for name in matcher.cells if name in found]
    if [name for name in dict.fromkeys(names) if name] != order:
        notes.append("The cells had been moved; they were run in the lab's order.")
    return found, own, notes


def better(first: str, second: str, given: str) -> str:
    """Of two copies of a cell the later one, unless nobody has written into it."""
    return first if plain(second) == plain(given) else second


def lab_name(notebook: NotebookNode) -> str:
    """The lab that a notebook says it is, such as ``00_meet_your_hosts``; or the empty string."""
    metadata: Any = notebook.get("metadata") or {}
    told: Any = metadata.get("rdmalab") if isinstance(metadata, dict) else None
    name: Any = told.get("lab") if isinstance(told, dict) else None
    return name if isinstance(name, str) else ""


def recognise(notebook: NotebookNode, labs: dict[str, NotebookNode]) -> str:
    """Which lab a submission is of: as it says itself, else by the cells that they share.

    ``labs``: released notebooks by name. The empty string if it is none of them.
    """
    told = lab_name(notebook)
    if told in labs:
        return told
    shares = {}
    for name, released in labs.items():
        matcher = Matcher(released)
        mine = {plain(cell.source) for cell in sources_of(notebook)}
        marks = {grade_id(cell) for cell in sources_of(notebook)} - {""}
        shares[name] = len(mine & set(matcher.by_text)) + 2 * len(marks & set(matcher.cells))
    best = max(shares, key=lambda name: shares[name], default="")
    return best if best and shares[best] >= 3 else ""
