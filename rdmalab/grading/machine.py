"""A machine for one submission: fresh hosts and a desk, watched from outside while cells run.

What a cell did is told by the guest's own process 1 (which kernel ended, and how) and by the
cgroups (whether there were too many processes), not by anything that runs beside the submission.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .. import lab as labs
from ..errors import BackendError, HostDied, HostError, HostTimeout, RemoteError
from ..kernels import HostKernel, why_died
from ..topology import DEFAULT_HOSTS, HOST_MEMORY_MIB
from .apparatus import DESK
from .plans import CheckPlan
from .results import CHARACTERS, Outcome
from .runner import Limits, MachineGone

__all__ = ["LabMachine", "sweep"]

PREFIX = "grade"
DEFINE_S = 20.0  # to make the lab's own functions anew on a host that may be at work
SETTLE_S = 0.3  # a kernel that was restarted is told of a moment later
OURS_LONGER = 5  # a cell of the lab's own has an end, however busy this machine is
_numbers = itertools.count(1)


class TooMuchOutput(Exception):
    """A cell printed more than it may."""


class Meter:
    """Counts a cell's output and keeps its beginning."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes, self.seen, self.text = limit_bytes, 0, ""

    def __call__(self, message: dict[str, Any]) -> None:
        """Take one Jupyter message of output."""
        content = message["content"]
        text = content.get("text", "")
        self.seen += len(text) + sum(len(str(v)) for v in content.get("data", {}).values())
        self.text += text[: CHARACTERS - len(self.text)]
        if self.seen > self.limit_bytes:
            raise TooMuchOutput


class LabMachine:
    """Hosts and desk of one submission's own; a context manager would outlive its steps."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.ident = f"{PREFIX}-{os.getpid()}-{next(_numbers)}"
        self.lab = labs.up(DEFAULT_HOSTS, lab=self.ident, desk=True, say=say)
        self.closed = False
        self.deaths: list[dict[str, Any]] = []
        self.lab.remote.listen(self.on_event)
        try:
            with ThreadPoolExecutor() as pool:  # a judge for each, before there is whom to judge
                list(pool.map(lambda host: self.kernel(host).guard(), [DESK, *DEFAULT_HOSTS]))
            self.forks = self.failed_forks()
        except BaseException:
            self.close()
            raise

    def on_event(self, event: dict[str, Any]) -> None:
        """The guest tells of a kernel's end; called in the remote's thread."""
        if event.get("state") in ("died", "failed"):
            self.deaths.append(event)

    def close(self) -> None:
        """Stop the machine and remove all of it."""
        self.closed = True
        labs.down(self.ident)

    def run(self, source: str, limits: Limits, *, ours: bool) -> Outcome:
        """A cell of the notebook, on the desk."""

        def cell(meter: Meter) -> Outcome:
            limit_s = limits.cell_s * (OURS_LONGER if ours else 1)
            self.kernel(DESK).run(source, timeout_s=limit_s, on_output=meter)
            return Outcome("ok")

        return self.watched(cell, limits, ours=ours)

    def check(self, plan: CheckPlan, limits: Limits) -> Outcome:
        """A check, from outside, where its plan says, with the lab's own definitions."""

        def ask(host: str) -> Outcome:
            said = self.kernel(host).check(plan.source, plan.briefs[host], timeout_s=limits.cell_s)
            return Outcome(said.ended, said.why, said.printed)

        def cell(meter: Meter) -> Outcome:
            for host, code in plan.elsewhere.items():
                self.define(host, code)
            with ThreadPoolExecutor(len(plan.hosts)) as pool:
                return together(list(pool.map(ask, plan.hosts)))

        return self.watched(cell, limits)

    def kernel(self, host: str) -> HostKernel:
        """The kernel of a host, or of the desk."""
        return self.lab[host].kernel if host else self.lab.desk.kernel

    def define(self, host: str, code: str) -> None:
        """Run definitions of the lab's own on a host; one that is at work does it later."""
        content = {"code": code, "silent": True, "store_history": False, "user_expressions": {}}
        content |= {"allow_stdin": False, "stop_on_error": False}
        self.kernel(host).ask("execute_request", content, DEFINE_S)

    def watched(
        self, cell: Callable[[Meter], Outcome], limits: Limits, *, ours: bool = False
    ) -> Outcome:
        """Run something, and say what became of it and of the kernels; ``ours``: the lab's own."""
        meter, begin, before = Meter(limits.output_bytes), time.monotonic(), len(self.deaths)
        try:
            ended = cell(meter)
        except RemoteError as error:
            ended = Outcome("raised", f"{error.ename}: {error.evalue}"[:CHARACTERS])
        except TooMuchOutput:
            ended = Outcome("stopped", f"printed more than {limits.output_bytes >> 20} MB.")
        except HostTimeout:
            ended = Outcome("stopped", f"did not finish within {limits.cell_s:g} s.")
        except HostDied as error:
            ended = Outcome("lost", f"ended {error.host}'s kernel.")
        except HostError as error:
            ended = Outcome("lost", f"left {error.host} in a state in which it does not answer.")
        except BackendError as error:
            raise MachineGone(str(error)) from None
        printed = ended.printed or meter.text
        ended = self.judged(ended, before, ours)
        return Outcome(ended.ended, ended.why, printed, time.monotonic() - begin)

    def judged(self, ended: Outcome, before: int, ours: bool) -> Outcome:
        """The outcome, unless something happened that this machine cannot be used after."""
        if ended.ended == "stopped":
            time.sleep(SETTLE_S)
        if len(self.deaths) > before:
            event = self.deaths[before]
            how = why_died(event, HOST_MEMORY_MIB)
            return Outcome("lost", f"ended the kernel of {event.get('host')}: it {how}.")
        if not ours and self.failed_forks() != self.forks:
            return Outcome("lost", "started more processes than a host may have.")
        return ended

    def failed_forks(self) -> dict[str, int]:
        """How often each host was refused another process, as the kernel counts it."""
        try:
            return dict(self.lab.remote.call("forks", timeout_s=60)["refused"])
        except BackendError as error:
            raise MachineGone(str(error)) from None


def together(outcomes: list[Outcome]) -> Outcome:
    """What a check that ran on several hosts found: all of them must be content."""
    bad = [outcome for outcome in outcomes if outcome.ended != "ok"]
    printed = "".join(outcome.printed for outcome in outcomes)
    first = bad[0] if bad else outcomes[0]
    return Outcome(first.ended, first.why, printed)


def sweep() -> None:
    """Stop what a grader that was killed has left running."""
    for name in labs.known():
        head, _, rest = name.partition("-")
        pid = rest.partition("-")[0]
        if head == PREFIX and pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
            labs.down(name)
