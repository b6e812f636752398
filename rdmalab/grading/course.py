"""The labs of a checkout as a grader needs them: with their solutions and as they were handed out.

Both forms are made by the checkout's own ``labs/build.py`` from the one source of each lab, so a
check that learners have seen and the check that grades them cannot drift apart.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import nbformat
from nbformat import NotebookNode

from ..errors import MachineError, UsageError
from .submission import kind_of, plain

__all__ = ["Course", "LabForms"]

HIDDEN = ("### BEGIN HIDDEN TESTS", "### END HIDDEN TESTS")


@dataclass(frozen=True, eq=False)
class LabForms:
    """One lab. ``solved``: with solutions and hidden tests; ``released``: as handed out."""

    name: str
    title: str
    solved: NotebookNode
    released: NotebookNode

    @functools.cached_property
    def tasks(self) -> dict[str, str]:
        """The tasks' ids with their titles: the last heading in front of each."""
        found, heading = {}, self.title
        for cell in self.released.cells:
            if cell.cell_type == "markdown":
                heads = [line for line in cell.source.splitlines() if line.startswith("#")]
                heading = heads[-1].lstrip("# ") if heads else heading
            elif kind_of(cell) == "task":
                found[cell.id] = heading
        return found

    @functools.cached_property
    def points(self) -> dict[str, float]:
        """The checks' ids with their points."""
        return {
            cell.id: cell.metadata.nbgrader.points
            for cell in self.solved.cells
            if cell.cell_type == "code" and kind_of(cell) == "check"
        }

    @functools.cached_property
    def sources(self) -> dict[str, str]:
        """The code cells as they were handed out, by id."""
        return {cell.id: cell.source for cell in self.released.cells if cell.cell_type == "code"}

    @functools.cached_property
    def hidden(self) -> str:
        """The text of all hidden tests, and of all solutions, that learners have not seen."""
        seen = {line.strip() for source in self.sources.values() for line in source.splitlines()}
        lines = (
            line
            for cell in self.solved.cells
            if cell.cell_type == "code"
            for line in cell.source.splitlines()
        )
        return "\n".join(
            line for line in lines if line.strip() not in seen and line.strip() not in HIDDEN
        )

    @functools.cached_property
    def digest(self) -> str:
        """A checksum over what decides about points."""
        total = hashlib.sha256()
        for form in (self.solved, self.released):
            for cell in form.cells:
                if cell.cell_type == "code":
                    points = cell.metadata.get("nbgrader", {}).get("points", "")
                    total.update(f"{cell.id}\0{points}\0{plain(cell.source)}\0".encode())
        return total.hexdigest()


class Course:
    """The labs of a folder such as ``labs/``, which has ``source/`` and ``build.py``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / "build.py").is_file() or not (folder / "source").is_dir():
            raise MachineError(
                f"{folder} has no labs with solutions (source/ and build.py), which grading needs.",
                next_step="Grade in a checkout, or let RDMALAB_LABS name its labs/ folder.",
            )

    @functools.cached_property
    def build(self) -> ModuleType:
        """The folder's build.py, which is a script and in no package."""
        script = self.folder / "build.py"
        spec = importlib.util.spec_from_file_location("rdmalab_labs_build", script)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module

    @functools.cached_property
    def names(self) -> list[str]:
        """The labs' names, such as ``01_register_memory``."""
        return [source.stem for source in self.build.sources(self.folder)]

    def find(self, word: str) -> str:
        """The lab that a word such as ``01``, ``1`` or its name means; :class:`UsageError`."""
        number = word.zfill(2) if word.isdigit() else word
        for name in self.names:
            if number in (name, name.partition("_")[0]):
                return name
        raise UsageError(f"There is no lab {word!r}; there are {', '.join(self.names)}.")

    @functools.cached_property
    def released(self) -> dict[str, NotebookNode]:
        """All labs as handed out, by name."""
        return {name: self.lab(name).released for name in self.names}

    @functools.cached_property
    def forms(self) -> dict[str, LabForms]:
        """What :meth:`lab` has read."""
        return {}

    def lab(self, name: str) -> LabForms:
        """A lab in both forms. Raises :class:`MachineError` where its source cannot be built."""
        if name not in self.forms:
            try:
                solved = self.build.solved(self.folder / "source" / f"{name}.py")
            except ValueError as error:  # build.py's LabError
                raise MachineError(f"The lab {name} cannot be built: {error}") from None
            released = self.build.release(solved)
            title = next(
                (
                    cell.source.splitlines()[0].lstrip("# ")
                    for cell in solved.cells
                    if cell.cell_type == "markdown" and cell.source.startswith("# ")
                ),
                name,
            )
            self.forms[name] = LabForms(name, title, solved, released)
        return self.forms[name]


def text_of(notebook: NotebookNode) -> str:
    """The text of a notebook file."""
    # nbformat has no types
    text: str = nbformat.writes(notebook)  # type: ignore[no-untyped-call]
    return text
