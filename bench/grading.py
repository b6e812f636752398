"""What grading a class costs: copies of one solved lab, beside the pure execution of their cells.

    python bench/grading.py                       30 copies of Lab 01, one after the other
    python bench/grading.py --lab 03 --copies 6

The reference is measured in the same run, before, between and after the copies' two halves: the
solved notebook's cells, checks included, run as plain cells on the desk of a lab that runs already
(a submission's cells run in the guest, so that none of them has the grader's rights). Starts,
judging instead of running, and reports are what grading adds. The same cells in a kernel outside
the guest are measured once, for information. Then some of the copies are graded once more, one and
two at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import os
import sys
import tempfile
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
from nbclient import NotebookClient
from rich.console import Console
from rich.table import Table

from rdmalab import lab as labs
from rdmalab.errors import RdmalabError
from rdmalab.grading.classroom import Classroom
from rdmalab.grading.course import Course, LabForms
from rdmalab.notebook import labs_folder

LIMIT = 1.3  # the promise: grading to pure execution
CELL_S = 600
SAMPLE_S = 0.5


class Memory:
    """The largest memory of this process and all below it, sampled beside what runs."""

    def __init__(self) -> None:
        self.most_mib, self.ended = 0.0, threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    def watch(self) -> None:
        """Look every half a second. What processes share counts once (PSS)."""
        while not self.ended.wait(SAMPLE_S):
            total = 0
            for process in psutil.process_iter(["cmdline"]):
                ours = process.pid == os.getpid() or any(
                    f"/labs/grade-{os.getpid()}-" in word for word in process.info["cmdline"] or ()
                )
                try:
                    total += process.memory_full_info().pss if ours else 0
                except psutil.Error:
                    continue
            self.most_mib = max(self.most_mib, total / 2**20)


def pure_seconds(lab: LabForms) -> float:
    """The sum of the times of the solved notebook's cells on a desk whose hosts run already."""
    ident = f"bench-{os.getpid()}"
    desk = labs.up(lab=ident, desk=True).desk
    taken = 0.0
    try:
        for cell in lab.solved.cells:
            if cell.cell_type == "code":
                begin = time.monotonic()
                desk.kernel.run(cell.source, timeout_s=CELL_S, on_output=lambda message: None)
                taken += time.monotonic() - begin
    finally:
        labs.down(ident)
    return taken


def outside_seconds(lab: LabForms) -> float:
    """As :func:`pure_seconds`, in a notebook's kernel on this machine, as a learner's is."""
    ident = f"bench-{os.getpid()}"
    labs.ensure(lab=ident)
    try:
        client = NotebookClient(
            copy.deepcopy(lab.solved), kernel_name="python3", timeout=CELL_S, record_timing=True
        )
        done = asyncio.run(client.async_execute(env={**os.environ, "RDMALAB_LAB": ident}))
    finally:
        labs.down(ident)
    return sum(map(seconds_of, done.cells))


def seconds_of(cell: Any) -> float:
    """How long a cell ran, as the kernel told it."""
    times = cell.metadata.get("execution", {})
    names = ("iopub.status.busy", "shell.execute_reply")
    if not all(name in times for name in names):
        return 0.0
    begin, end = (datetime.fromisoformat(times[name].replace("Z", "+00:00")) for name in names)
    return (end - begin).total_seconds()


def answers(lab: LabForms, folder: Path, count: int) -> list[Path]:
    """So many copies of the solved lab, as learners would hand them in."""
    right = {cell.id: cell.source for cell in lab.solved.cells}
    notebook = copy.deepcopy(lab.released)
    for cell in notebook.cells:
        if cell.id in lab.tasks:
            lines = right[cell.id].splitlines()
            cell.source = "\n".join(x for x in lines if not x.lstrip().startswith("###"))
    files = [folder / f"copy{number:02}.ipynb" for number in range(count)]
    for file in files:
        file.write_text(json.dumps(notebook))
    return files


def graded_seconds(course: Course, files: list[Path], out: Path, jobs: int) -> float:
    """How long it takes to grade these files; all of them must get full points."""
    begin = time.monotonic()
    room = Classroom(course, out)
    results = room.grade(
        files, jobs, lambda result, new: print(end=".", file=sys.stderr, flush=True)
    )
    print(file=sys.stderr)
    taken = time.monotonic() - begin
    short = [(r.name, r.score, r.notes) for r in results if not r.graded or r.score < r.points]
    assert not short, short
    return taken


def main() -> int:
    """Measure, print a table; exit 1 if the promise is not kept."""
    parser = argparse.ArgumentParser(description="What grading a class costs.")
    parser.add_argument("--lab", default="01")
    parser.add_argument("--copies", type=int, default=30)
    parser.add_argument("--beside", type=int, default=6, help="copies for --jobs 1 against 2")
    options = parser.parse_args()
    course = Course(labs_folder())
    lab = course.lab(course.find(options.lab))
    memory = Memory()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = answers(lab, folder, options.copies)
        half = len(files) // 2
        graded_seconds(course, files[:1], folder / "warm", 1)  # the first start is booted here
        pure = [pure_seconds(lab)]
        grading = graded_seconds(course, files[:half], folder / "first", 1)
        pure.append(pure_seconds(lab))
        grading += graded_seconds(course, files[half:], folder / "second", 1)
        pure.append(pure_seconds(lab))
        outside = outside_seconds(lab)
        one, two = (
            graded_seconds(course, files[: options.beside], folder / f"jobs{jobs}", jobs)
            for jobs in (1, 2)
        )
    table = Table(title=f"{lab.name}, {options.copies} copies, load {os.getloadavg()[0]:.1f}")
    for title in ("what", "grading (s)", "reference (s)", "ratio", "limit"):
        table.add_column(title, justify="left" if title == "what" else "right")
    whole = sum(pure) / len(pure) * len(files)
    for what, ours, reference, limit in (
        ("grading / pure execution", grading, whole, f"{LIMIT:g}"),
        ("grading / the same outside the guest", grading, outside * len(files), "-"),
        (f"{options.beside} copies, two jobs / one", two, one, "1"),
    ):
        ratio = ours / reference
        table.add_row(what, f"{ours:.1f}", f"{reference:.1f}", f"{ratio:.2f}", limit)
    console = Console()
    console.print(table)
    console.print(f"most memory, with two jobs: {memory.most_mib:.0f} MiB")
    return 0 if grading <= LIMIT * whole and two < one else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RdmalabError as error:
        sys.exit(f"bench/grading.py: {error}")
