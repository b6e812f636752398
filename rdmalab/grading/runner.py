"""One submission, run step by step on machines that may be lost on the way.

Nothing of a submission is believed but the outcomes of checks, and those come from outside. A cell
that ends a kernel, does not obey an interrupt or takes the whole machine along costs its own points
and no others: the machine is thrown away, and all steps are run again from the start on a fresh
one, with the lab's own cell in place of that one. Verdicts that were found before it stay.

::

    steps ──▶ machine 1:  given  task  check  task ✗ (os._exit)
              machine 2:  given  task  check  (as handed out)  check  given  task  check ...
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..errors import RdmalabError
from .course import LabForms
from .plans import CheckPlan, plans
from .results import Outcome
from .submission import Step

__all__ = ["Limits", "Machine", "MachineGone", "Run"]

NOT_ANSWERED = "The task's cell is as it was handed out."
SAID_CHARACTERS = 300
STARTS = 2  # tries to start a machine
RUN = Outcome("ok")
AGAIN = ("ok", "raised", "refused")  # checks that run in each pass, for what follows them


@dataclass(frozen=True)
class Limits:
    """What a submission may use; ``output_bytes`` is for one cell."""

    cell_s: float = 120.0
    notebook_s: float = 1800.0
    output_bytes: int = 4 << 20
    machines: int = 8


class MachineGone(RdmalabError):
    """The machine ended while a cell ran, and nobody can say whose fault that is."""


class Machine(Protocol):
    """Fresh hosts and a desk. An outcome ``lost`` means that it must be thrown away."""

    closed: bool

    def run(self, source: str, limits: Limits, *, ours: bool) -> Outcome:
        """A cell of the notebook, on the desk; ``ours``: as the lab has handed it out."""

    def check(self, plan: CheckPlan, limits: Limits) -> Outcome:
        """A check, from outside, where its plan says."""

    def close(self) -> None:
        """Throw the machine away; may be called twice, and from another thread."""


@dataclass
class Run:
    """Runs a submission's steps. After :meth:`grade`, ``verdicts`` has each check's outcome."""

    lab: LabForms
    steps: Sequence[Step]
    start: Callable[[], Machine]
    limits: Limits = field(default_factory=Limits)
    verdicts: dict[str, Outcome] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)  # step -> why it is not run any more
    overran: set[str] = field(default_factory=set)  # steps that are not waited for again
    cell_seconds: float = 0.0
    machines: int = 0
    suspects: set[str] = field(default_factory=set)  # steps in which a machine went once
    ends: float = 0.0

    def grade(self) -> None:
        """Run everything. Raises :class:`RdmalabError` if this machine cannot start hosts."""
        self.ends = time.monotonic() + self.limits.notebook_s
        while self.last_open() >= 0 and self.machines < self.limits.machines and self.once():
            pass
        for check in self.lab.points:
            why = "The notebook ended its kernel, or its machine, too often to get this far."
            self.verdicts.setdefault(check, Outcome("not run", why))

    def last_open(self) -> int:
        """The number of the last check that has no verdict yet, or -1. Without an answer: none."""
        last = -1
        for number, step in enumerate(self.steps):
            if step.kind == "check" and step.id not in self.verdicts:
                if self.answered(number):
                    last = number
                else:
                    self.verdicts[step.id] = Outcome("not run", NOT_ANSWERED)
        return last

    def once(self) -> bool:
        """One pass on a fresh machine. True if it was lost and there must be another."""
        number = 0
        machine = self.started()
        try:
            for number, step in enumerate(self.steps[: self.last_open() + 1]):
                if not self.in_time():
                    return False
                outcome = self.step(machine, step)
                if outcome is not None and outcome.ended == "lost":
                    self.drop(number, outcome.why)
                    return True
            return False
        except MachineGone as gone:
            self.gone(number, gone)
            return True
        finally:
            machine.close()

    def started(self) -> Machine:
        """A fresh machine; a start that fails is tried once more."""
        self.machines += 1
        for attempt in range(1, STARTS + 1):
            try:
                return self.start()
            except RdmalabError:
                if attempt == STARTS:
                    raise
        raise AssertionError("unreachable")

    def in_time(self) -> bool:
        """Whether the notebook may go on; if not, its other checks were not run."""
        if time.monotonic() < self.ends:
            return True
        why = f"The notebook had run for {self.limits.notebook_s:g} s, which is the limit."
        for check in self.lab.points:
            self.verdicts.setdefault(check, Outcome("not run", why))
        self.notes.append(why)
        return False

    def step(self, machine: Machine, step: Step) -> Outcome | None:
        """Run one step, and keep a check's verdict. None if there was nothing to run."""
        outcome = None
        dropped = step.id in self.dropped
        if step.kind != "check":
            as_given = dropped or step.id in self.overran
            source = self.lab.sources.get(step.id) if as_given else step.source
            ours = as_given or not step.changed
            if source is not None:
                outcome = machine.run(source, self.limits, ours=ours)
        elif not dropped and self.verdicts.get(step.id, RUN).ended in AGAIN:
            outcome = machine.check(plans(self.lab)[step.id], self.limits)
            self.verdicts.setdefault(step.id, outcome)
        if outcome is not None:
            self.cell_seconds += outcome.seconds
            if outcome.ended == "stopped" and step.kind != "check":
                self.notes.append(f"{self.called(step)} {outcome.why}")
                self.overran.add(step.id)
        return outcome

    def answered(self, number: int) -> bool:
        """Whether a learner has written anything that this check could be about."""
        task = max(n for n in range(number) if self.steps[n].kind == "task")
        before = [n for n in range(number) if self.steps[n].kind in ("own", "given")]
        return any(
            self.steps[n].changed and self.steps[n].id not in self.dropped for n in (task, *before)
        )

    def called(self, step: Step) -> str:
        """A step as a learner knows it."""
        names = {"task": f"The answer to {step.id}", "check": f"The check {step.id}"}
        if step.kind in names:
            return names[step.kind]
        first = next((line.strip() for line in step.source.splitlines() if line.strip()), "")
        return f"The cell that begins with {first[:50]!r}"

    def drop(self, number: int, why: str) -> None:
        """Leave a step out from now on; if it is the lab's own, what the learner ran before it."""
        step = self.steps[number]
        if step.kind == "check" or (step.changed and step.id not in self.dropped):
            culprit = step
        else:
            earlier = [s for s in self.steps[:number] if s.changed and s.id not in self.dropped]
            if not earlier:
                raise MachineGone(f"The lab's own cell {step.id} did this: {why}")
            culprit = earlier[-1]
        self.dropped[culprit.id] = why
        self.notes.append(f"{self.called(culprit)} {why} The rest was run without it.")
        if culprit.kind == "task":
            for check in self.lab.points:
                if check.startswith(f"{culprit.id}-"):
                    self.verdicts.setdefault(check, Outcome("lost", f"The answer {why}"))

    def gone(self, number: int, error: MachineGone) -> None:
        """The machine went as a step ran: once may be this computer's fault, twice is not."""
        step = self.steps[number]
        if step.id in self.suspects:
            self.verdicts.pop(step.id, None)
            if step.kind == "check":
                self.verdicts[step.id] = Outcome("lost", "The whole machine ended.")
            self.drop(number, "ended the whole machine.")
        self.suspects.add(step.id)
