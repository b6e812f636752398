"""What a check needs to know of its lab, worked out from the lab's own cells alone.

A check's names come from three places: the lab's definitions, which the judge makes anew; earlier
checks, whose results the judge has kept, out of the learner's reach; and the notebook. Which name
is which is decided here, from the source that the lab has handed out, not from what was submitted.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from ..hostside import checkcode
from ..verdicts import Brief
from .apparatus import body_of, hosts_of
from .course import LabForms
from .submission import kind_of

__all__ = ["Briefs"]


@dataclass(frozen=True)
class Cell:
    """One of a lab's code cells. ``text``: its Python, without magics and shell lines."""

    id: str
    kind: str
    hosts: tuple[str, ...]
    text: str

    def made(self) -> set[str]:
        """The names that it makes."""
        return checkcode.made_by(self.text)

    def free(self) -> set[str]:
        """The names that it reads before it has made them."""
        return checkcode.free(checkcode.parse(self.text))


def python_of(source: str) -> str:
    """A cell of the lab's without its magics and shell lines; empty if no Python is left."""
    lines = body_of(source).splitlines()
    text = "\n".join("" if line.lstrip()[:1] in ("%", "!") else line for line in lines)
    try:
        checkcode.parse(text)
    except checkcode.CheckError:
        return ""
    return text


def cells_of(lab: LabForms) -> Iterator[Cell]:
    """A lab's code cells: checks with their hidden tests, tasks in both forms."""
    for cell in lab.solved.cells:
        if cell.cell_type != "code":
            continue
        kind, texts = kind_of(cell), [cell.source]
        if kind == "task":
            texts.append(lab.sources[cell.id])
        hosts = hosts_of(cell.source) or ("",)
        yield Cell(cell.id, kind, hosts, "\n".join(map(python_of, texts)))


class Briefs:
    """The briefs of one lab's checks, by host (the desk is the empty string)."""

    def __init__(self, lab: LabForms) -> None:
        self.cells = list(cells_of(lab))

    def for_check(self, check: str) -> dict[str, Brief]:
        """The briefs of a check on each host where it runs."""
        (at,) = (n for n, cell in enumerate(self.cells) if cell.id == check)
        return {host: self.brief(at, host) for host in self.cells[at].hosts}

    def brief(self, at: int, host: str) -> Brief:
        """The brief of the check that is cell number ``at``, on one host."""
        check = self.cells[at]
        before = [cell for cell in self.cells[:at] if host in cell.hosts]
        after = [cell for cell in self.cells[at + 1 :] if host in cell.hosts]
        last: dict[str, str] = {}
        for cell in before:
            last.update(dict.fromkeys(cell.made(), cell.kind))
        carry = {name for name in check.free() if last.get(name) == "check"}
        later = {n for cell in after if cell.kind == "check" for n in cell.free()} & check.made()
        keep = {n for cell in (*before, *after) if cell.kind != "check" for n in cell.made()}
        keep |= {n for cell in after if cell.kind != "check" for n in cell.free()} & check.made()
        return Brief(
            given=checkcode.definitions([(cell.text, cell.kind != "task") for cell in before]),
            asked=sorted(asked(before)),
            carry=sorted(carry),
            later=sorted(later),
            keep=sorted(keep),
        )


def asked(cells: list[Cell]) -> set[str]:
    """The classes that tasks ask for."""
    return {
        node.name
        for cell in cells
        if cell.kind == "task"
        for node in checkcode.parse(cell.text).body
        if isinstance(node, ast.ClassDef)
    }
