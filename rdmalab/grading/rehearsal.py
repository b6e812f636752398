"""A learner's own notebook, run on this machine with fresh hosts: what ``rdmalab check`` does.

The checks are the lab's public ones, whatever has become of them in the notebook, and they run as
the notebook's own cells do. This is for one's own work: grading trusts less (:mod:`.runner`).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

from .. import lab as labs
from ..state import lab_folder
from .course import LabForms
from .results import CheckResult, Outcome, SubmissionResult, TaskResult, by_task, passed
from .runner import Limits
from .submission import Step, grade_id, kind_of, restore, sources_of

__all__ = ["Rehearsal", "forms_of"]

START_S = 120  # for the notebook's kernel, on a busy machine
END_S = 30  # for a cell's last outputs, once it was interrupted
OVERRAN = "rdmalab's cell limit"
quiet = logging.Logger("rdmalab.rehearsal", logging.CRITICAL)


class Client(NotebookClient):
    """nbclient that keeps a bounded part of what a cell writes, and knows which cell overran."""

    written, overran = 0, False

    async def run(self, cell: NotebookNode, number: int) -> None:
        """Run one cell. Raises nbclient's errors if the kernel died, or does not obey."""
        self.written, self.overran = 0, False
        await self.async_execute_cell(cell, number)

    def output(self, outs: list[NotebookNode], msg: dict[str, Any], *more: Any) -> Any:
        """Take one message of a cell's output, or drop it."""
        self.written += len(str(msg["content"]))
        if self.written > Limits().output_bytes and msg["msg_type"] != "error":
            return None
        return super().output(outs, msg, *more)

    def ran(self, execute_reply: dict[str, Any], **more: Any) -> None:
        """A cell has ended; nbclient's hook."""
        self.overran = execute_reply["content"].get("ename") == OVERRAN


class Rehearsal:
    """One run of a notebook. ``tell`` hears each check's result as it comes.

    ``cell_s``: seconds for one cell, after which it is interrupted.
    """

    def __init__(
        self,
        notebook: NotebookNode,
        lab: LabForms,
        *,
        cell_s: float,
        tell: Callable[[CheckResult], None],
    ) -> None:
        restored = restore(notebook, lab.released, lab.released)
        self.lab, self.tell, self.cell_s = lab, tell, cell_s
        self.steps, self.notes = restored.steps, restored.notes
        self.results: list[CheckResult] = []

    def run(self, folder: Path) -> SubmissionResult:
        """Run all cells in ``folder``; raises :class:`~rdmalab.errors.RdmalabError` without hosts.

        Hosts of its own are started for it, and stopped whatever happens.
        """
        name = f"check-{os.getpid()}"
        try:
            labs.ensure(lab=name)
            self.socket = lab_folder(name) / "notebook.json"
            asyncio.run(self.execute(folder, {**os.environ, "RDMALAB_LAB": name}))
        finally:
            labs.down(name)
        return self.result()

    def client(self, notebook: NotebookNode, folder: Path) -> Client:
        """The notebook's kernel is the kit's own, whatever the notebook asks for."""
        client = Client(
            notebook,
            log=quiet,
            timeout=self.cell_s,
            startup_timeout=START_S,
            iopub_timeout=END_S,
            raise_on_iopub_timeout=True,
            kernel_name="python3",
            allow_errors=True,
            interrupt_on_timeout=True,
            error_on_timeout={"ename": OVERRAN, "evalue": "", "traceback": []},
            resources={"metadata": {"path": str(folder)}},
        )
        client.on_cell_executed = client.ran
        client.km = client.create_kernel_manager()
        client.km.transport = "ipc"  # no other user of this machine can listen
        client.km.connection_file = str(self.socket)
        client.owns_km = True
        return client

    async def execute(self, folder: Path, env: dict[str, str]) -> None:
        """Run the cells one by one until the end, or the end of the kernel."""
        make: Any = nbformat.v4  # has no types
        cells = [make.new_code_cell(step.source) for step in self.steps]
        client = self.client(make.new_notebook(cells=cells), folder)
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        async with client.async_setup_kernel(env=env):
            for signum, handler in handlers.items():  # nbclient's would end the kernel only
                asyncio.get_running_loop().remove_signal_handler(signum)
                signal.signal(signum, handler)
            for number, (step, cell) in enumerate(zip(self.steps, cells, strict=True)):
                try:
                    await client.run(cell, number)
                except DeadKernelError:
                    return self.stopped(number, "the notebook's kernel ended in")
                except CellTimeoutError:
                    return self.stopped(number, f"after {self.cell_s:g} s nothing could interrupt")
                if step.kind == "check":
                    self.keep(step, ended(cell, self.cell_s if client.overran else 0))

    def keep(self, step: Step, outcome: Outcome) -> None:
        """Note a check's result, and tell it."""
        told = tuple(line for line in outcome.printed.splitlines() if line.strip())
        points = self.lab.points[step.id]
        result = passed(step.id, points, outcome, told=told, reason_told=outcome.why)
        self.results.append(result)
        self.tell(result)

    def stopped(self, number: int, what: str) -> None:
        """The kernel is lost in a cell: the checks from there on have not been run."""
        first = self.steps[number].source.strip().partition("\n")[0]
        why = f"Not run: {what} the cell that begins with {first[:60]!r}."
        for step in self.steps[number:]:
            if step.kind == "check":
                self.keep(step, Outcome("not run", why))

    def result(self) -> SubmissionResult:
        """All results, by task."""
        found = by_task(self.results, list(self.lab.tasks))
        sources = {step.id: step.source for step in self.steps}
        tasks = tuple(
            TaskResult(task, title, sources.get(task, ""), tuple(found[task]))
            for task, title in self.lab.tasks.items()
        )
        return SubmissionResult("", "", self.lab.name, self.lab.title, tasks, self.notes)


def ended(cell: NotebookNode, overran_s: float) -> Outcome:
    """How a cell ended, from its outputs. ``overran_s``: the limit, if it was stopped by it."""
    printed = "".join(
        one.text for one in cell.outputs if one.output_type == "stream" and one.name == "stdout"
    )
    error = next((one for one in cell.outputs if one.output_type == "error"), None)
    if overran_s:
        why = f"It was stopped after {overran_s:g} s, the limit for one cell."
        return Outcome("stopped", why, printed)
    if error is None:
        return Outcome("ok", "", printed)
    return Outcome("raised", sentence(error.ename, error.evalue), printed)


def sentence(ename: str, evalue: str) -> str:
    """What an error says: an assertion its own sentence, another its name as well."""
    said = evalue.partition(f"{ename}: ")[2] if evalue.startswith("[") else evalue
    return said if ename == "AssertionError" and said else f"{ename}: {said or evalue}"


def forms_of(notebook: NotebookNode, name: str) -> tuple[LabForms, list[str]]:
    """A lab made of a learner's notebook, where its source is not at hand; and what is amiss.

    Its checks are taken as they stand; those that differ from what was handed out, as nbgrader's
    checksums tell, are named.
    """
    edited = [
        f"The check {grade_id(cell)} was edited; grading runs the lab's own."
        for cell in sources_of(notebook)
        if kind_of(cell) == "check" and cell.metadata.nbgrader.get("checksum") != checksum(cell)
    ]
    return LabForms(name, name, notebook, notebook), edited


def checksum(cell: NotebookNode) -> str:
    """nbgrader's checksum of a cell, computed as it does: a container's image has no nbgrader."""
    marks = cell.metadata.nbgrader
    words = [cell.source, cell.cell_type]
    words += [str(marks.get(role, False)) for role in ("grade", "solution", "locked")]
    words += [marks["grade_id"], *([str(float(marks["points"]))] if marks.get("grade") else [])]
    return hashlib.md5("".join(words).encode(), usedforsecurity=False).hexdigest()
