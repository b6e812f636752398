"""How each check of a lab is run: where, with what it must know, and what may speak in it.

A check uses what earlier cells of the lab have made, and a submission can make it anew and answer
what it likes. So a check brings the lab's own definitions along (:mod:`.briefs`); one that runs on
the desk and calls code on hosts has them made anew there, too.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..hostside import checkcode
from ..verdicts import Brief
from .apparatus import DESK, portable
from .briefs import Briefs, Cell, python_of
from .course import LabForms

__all__ = ["CheckPlan", "plans"]


@dataclass(frozen=True)
class CheckPlan:
    """How a check is run.

    ``hosts``: where, ``DESK`` for the desk; ``source``: all of it, hidden tests included;
    ``briefs``: by host; ``elsewhere``: for a check on the desk, what the lab has defined on hosts;
    ``public``: all source, as handed out, that can speak in this check.
    """

    hosts: tuple[str, ...]
    source: str
    briefs: dict[str, Brief]
    elsewhere: dict[str, str] = field(default_factory=dict)
    public: str = ""


@functools.lru_cache(maxsize=16)
def plans(lab: LabForms) -> dict[str, CheckPlan]:
    """How each check of a lab is run, by its id."""
    briefs, found = Briefs(lab), {}
    for number, cell in enumerate(briefs.cells):
        if cell.kind != "check":
            continue
        mine = briefs.for_check(cell.id)
        elsewhere = on_hosts(briefs.cells[:number]) if cell.hosts == (DESK,) else {}
        spoken = [brief.given for brief in mine.values()] + list(elsewhere.values())
        public = "\n".join([python_of(lab.sources[cell.id]), *spoken])
        found[cell.id] = CheckPlan(cell.hosts, cell.text, mine, elsewhere, public)
    return found


def on_hosts(cells: Sequence[Cell]) -> dict[str, str]:
    """What these cells define on each host, as far as it can be made anew there."""
    hosts = dict.fromkeys(host for cell in cells for host in cell.hosts if host != DESK)
    found = {}
    for host in hosts:
        texts = [(cell.text, cell.kind != "task") for cell in cells if host in cell.hosts]
        found[host] = portable(checkcode.definitions(texts))
    return found
