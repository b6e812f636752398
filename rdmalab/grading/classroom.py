"""A class: many submissions, graded one beside the other, each on machines of its own.

::

    OUT/results.csv             the class: one line for each submission
    OUT/results/NAME.json       the instructor's: all that was found
    OUT/feedback/NAME.html      the learner's: may be handed out as it is

What is finished is written at once, so an interrupt loses only what was running. A submission that
has been graded is not run again, unless it, its lab or this version has changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from .. import __version__
from ..errors import MachineError, RdmalabError, UsageError
from .course import Course, LabForms
from .feedback import page
from .machine import LabMachine, sweep
from .report import tasks_of
from .results import SubmissionResult, class_csv
from .runner import Limits, Run
from .submission import LARGEST_BYTES, read, recognise, restore
from .supply import Start, Supply

__all__ = ["Classroom", "names_for"]

LOOK_S = 0.2
NAME_CHARACTERS = 80
UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


def safe(text: str) -> str:
    """A file's name made of harmless characters only."""
    return UNSAFE.sub("_", text).strip("._-")[:NAME_CHARACTERS] or "submission"


def names_for(files: Sequence[Path]) -> list[str]:
    """A name for each submission: its file's; with its folder's, or a number, where two are alike.

    >>> names_for([Path("a/lab01.ipynb"), Path("b/lab01.ipynb"), Path("x y.ipynb")])
    ['a-lab01', 'b-lab01', 'x_y']
    """
    short = [safe(file.stem) for file in files]
    long = [safe(f"{file.absolute().parent.name}-{file.stem}") for file in files]
    names = [s if short.count(s) == 1 else n for s, n in zip(short, long, strict=True)]
    digests = [hashlib.sha256(os.fsencode(file.absolute())).hexdigest()[:8] for file in files]
    return [
        n if names.count(n) == 1 else f"{n}-{digest}"
        for n, digest in zip(names, digests, strict=True)
    ]


def write(file: Path, text: str) -> None:
    """Replace a file all at once: a reader, or an interrupt, never finds half of it."""
    part = file.with_name(f".{file.name}.part")
    part.write_text(text, encoding="utf-8", errors="replace")
    part.replace(file)


@dataclass
class Classroom:
    """Grades submissions into a folder. ``lab``: what all must be of, or empty: as they say."""

    course: Course
    out: Path
    lab: str = ""
    limits: Limits = field(default_factory=Limits)
    say: Callable[[str], None] = lambda text: None
    start: Start = LabMachine
    supply: Supply = field(default_factory=Supply)

    def grade(
        self,
        files: Sequence[Path],
        jobs: int,
        heard: Callable[[SubmissionResult, bool], None],
    ) -> list[SubmissionResult]:
        """Grade all files; ``heard`` is called with each result as it comes, and if it is new.

        Written are the results, the pages and, at the end or at an interrupt, the table.
        """
        self.make_folders()
        sweep()
        results: dict[str, SubmissionResult] = {}
        self.supply = Supply(len(files), self.say, self.start)
        pool = ThreadPoolExecutor(jobs, thread_name_prefix="rdmalab-grade")
        try:
            named = zip(names_for(files), files, strict=True)
            waiting = {pool.submit(self.one, name, file): name for name, file in named}
            for future in self.as_they_come(set(waiting)):
                result, new = future.result()
                results[result.name] = result
                heard(result, new)
        finally:
            self.stop(pool)
            found = [results[name] for name in names_for(files) if name in results]
            if found:
                write(self.out / "results.csv", class_csv(found))
        return found

    def make_folders(self) -> None:
        """The folders for what is found."""
        try:
            for name in ("results", "feedback"):
                (self.out / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise MachineError(
                f"The results cannot be written to {self.out}: {error.strerror}.",
                next_step="--out names another folder.",
            ) from None

    @staticmethod
    def as_they_come(
        waiting: set[Future[tuple[SubmissionResult, bool]]],
    ) -> Iterator[Future[tuple[SubmissionResult, bool]]]:
        """Futures as they are done; an interrupt is heard at once."""
        while waiting:
            done, waiting = wait(waiting, timeout=LOOK_S, return_when=FIRST_COMPLETED)
            yield from done

    def stop(self, pool: ThreadPoolExecutor) -> None:
        """End what still runs, its machines first: nobody waits for a cell to finish."""
        pool.shutdown(wait=False, cancel_futures=True)
        self.supply.stop()
        pool.shutdown(wait=True)

    # --- one submission ---------------------------------------------------------------------

    def one(self, name: str, file: Path) -> tuple[SubmissionResult, bool]:
        """The result for a file, and whether it is new; written when this returns."""
        self.supply.begun()
        key = self.key(file)
        known = self.known(name, key)
        if known is not None:
            return known, False
        begin = time.monotonic()
        result = SubmissionResult(name, str(file), key=key)
        try:
            self.fill(result, file)
        except UsageError as error:
            result.problem = str(error)
        except RdmalabError as error:
            if self.supply.ended.is_set():
                raise
            result.graded = False
            result.notes.append("This computer could not grade it: not the notebook's fault.")
            self.say(f"{name} could not be graded: {error}")
        result.seconds = time.monotonic() - begin
        if self.supply.ended.is_set():
            raise MachineError("interrupted")
        write(self.out / "feedback" / f"{name}.html", page(result))
        text = json.dumps(result.as_dict(), indent=2) + "\n"
        write(self.out / "results" / f"{name}.json", text)
        return result, True

    def key(self, file: Path) -> str:
        """A checksum over the submission, all labs' checks and this version."""
        total = hashlib.sha256(f"{__version__}\0{self.lab}\0{self.limits}\0".encode())
        for name in self.course.names:
            total.update(self.course.lab(name).digest.encode())
        try:
            size = file.stat().st_size
            total.update(b"too large" if size > LARGEST_BYTES else file.read_bytes())
        except OSError as error:
            total.update(str(error.errno).encode())
        return total.hexdigest()

    def known(self, name: str, key: str) -> SubmissionResult | None:
        """The result of an earlier run, if it still holds."""
        try:
            text = (self.out / "results" / f"{name}.json").read_text(encoding="utf-8")
            found = SubmissionResult.from_dict(json.loads(text))
        except (OSError, ValueError, KeyError, TypeError):
            return None
        there = (self.out / "feedback" / f"{name}.html").is_file()
        return found if found.key == key and found.graded and there else None

    def fill(self, result: SubmissionResult, file: Path) -> None:
        """Read, recognise and run a submission. :class:`UsageError`: why it is none of ours."""
        if self.lab:
            self.describe(result, self.course.lab(self.lab), None)
        notebook = read(file)
        name = recognise(notebook, self.course.released)
        if not name:
            raise UsageError("This is none of the labs' notebooks: it has none of their cells.")
        if self.lab and name != self.lab:
            raise UsageError(f"This is the notebook of the lab {name}, not of {self.lab}.")
        lab = self.course.lab(name)
        restored = restore(notebook, lab.solved, lab.released)
        result.notes += restored.notes
        run = Run(lab, restored.steps, self.supply.fresh, self.limits)
        try:
            run.grade()
        finally:
            self.describe(result, lab, run)
            result.notes += run.notes

    @staticmethod
    def describe(result: SubmissionResult, lab: LabForms, run: Run | None) -> None:
        """Put into a result what is known of its lab, and what its run has found."""
        result.lab, result.title = lab.name, lab.title
        result.tasks = tasks_of(lab, run.steps if run else (), run.verdicts if run else {})
        if run is not None:
            result.cell_seconds, result.machines = run.cell_seconds, run.machines
