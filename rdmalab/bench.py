"""``rdmalab bench``: TCP and RDMA between two hosts, in Python and in C, in one run.

Each kind of message is measured by our own loop and by the tool that people trust, in turn, several
times; what counts is the median of the ratios. A figure for RDMA hardware it is not, and it never
says that one kind is faster than another: what is measured here is a software device.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import lab as labs
from .lab import Lab

__all__ = ["LIMIT", "Report", "Row", "measure", "run"]

SIZE_BYTES = 64
ROUNDS = 1000
REPEATS = 5
LIMIT = 2.0  # Python to C, for the kinds with a promise
PROMISED = ("send", "tcp")
NAMES = {"tcp": "TCP", "send": "RDMA SEND", "write": "RDMA WRITE", "read": "RDMA READ"}
WHAT = {"read": "whole READ"}
ENDS = ("p50", "p99")

HOST_CODE = """
import math
import statistics

import numpy
from rdmalab import measure, tools

session = measure.Session("bob")
taken = {}


def take(kind, side, size, rounds):
    run = session.run if side == "python" else session.tool
    taken.setdefault((kind, side), []).append(run(kind, size=size, rounds=rounds))


def told(kind, side):
    samples = numpy.concatenate(taken[kind, side])
    edges = 10 ** numpy.arange(
        math.floor(math.log10(samples.min()) * 10) / 10, math.log10(samples.max()) + 0.1, 0.1
    )
    counts, edges = numpy.histogram(samples, bins=edges)
    shape = {"edges_us": edges.round(3).tolist(), "counts": counts.tolist()}
    return measure.summary(samples) | {"histogram": shape}


def row(kind):
    pairs = zip(taken[kind, "python"], taken[kind, "tool"], strict=True)
    half = 0.5
    ratios = [measure.percentile(a, half) / measure.percentile(b, half) for a, b in pairs]
    return {
        "kind": kind,
        "tool": tools.TOOLS[kind],
        "ours": told(kind, "python"),
        "theirs": told(kind, "tool"),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "ratio": round(statistics.median(ratios), 3),
    }
"""


@dataclass
class Row:
    """One kind of message: our loop's samples and the tool's (percentiles, histogram, us)."""

    kind: str
    tool: str
    ours: dict[str, Any]
    theirs: dict[str, Any]
    ratios: list[float]  # of the medians, run by run
    ratio: float  # their median

    @property
    def kept(self) -> bool | None:
        """Whether the promise is; None for a kind without one."""
        return self.ratio <= LIMIT if self.kind in PROMISED else None

    def document(self) -> dict[str, Any]:
        """The row for ``--json``."""
        facts = {
            "operation": NAMES[self.kind],
            "sample": WHAT.get(self.kind, "half a round trip"),
            "limit": LIMIT if self.kept is not None else None,
            "kept": self.kept,
        }
        return {**self.__dict__, **facts}


@dataclass
class Report:
    """All rows, and the conditions they were measured under."""

    accel: str
    accel_why: str
    backend: str
    rows: list[Row]

    @property
    def caveats(self) -> list[str]:
        """What a reader must know before drawing a conclusion."""
        machine = "emulated processors (tcg)" if self.accel == "tcg" else f"accel {self.accel}"
        return [
            f"Measured on {machine}, backend {self.backend}: {self.accel_why}.",
            "RDMA is Soft-RoCE here: the device is kernel software on the same processors. These"
            " are no figures for RDMA hardware; labs/data/hardware.csv has published ones.",
            "Compare Python with the C tool on the same line. Lines of different kinds measure"
            " different software, and say nothing about RDMA against TCP.",
            f"sockperf's smallest message is 14 bytes; all runs here send {SIZE_BYTES}.",
        ]

    def document(self) -> dict[str, Any]:
        """The report for ``--json``."""
        return {
            "accel": self.accel,
            "accel_why": self.accel_why,
            "backend": self.backend,
            "size_bytes": SIZE_BYTES,
            "rounds": ROUNDS,
            "repeats": REPEATS,
            "rows": [row.document() for row in self.rows],
            "caveats": self.caveats,
        }

    def show(self, as_json: bool) -> None:
        """The table and its caveats on stdout, or one JSON document."""
        if as_json:
            print(json.dumps(self.document(), indent=2))
            return
        from rich.console import Console
        from rich.table import Table

        title = f"{SIZE_BYTES}-byte messages, microseconds, {REPEATS} x {ROUNDS} rounds"
        table = Table(title=title, title_justify="left")
        for head in ("", "sample", "Python p50", "p99", "in C", "p50", "p99", "Python/C"):
            table.add_column(head, justify="left" if head in ("", "sample", "in C") else "right")
        for row in self.rows:
            figures = [f"{side[name]:.1f}" for side in (row.ours, row.theirs) for name in ENDS]
            words = [NAMES[row.kind], WHAT.get(row.kind, "half round trip"), *figures[:2]]
            table.add_row(*words, row.tool, *figures[2:], f"{row.ratio:.2f}")
        console = Console(width=100)
        console.print(table)
        for caveat in self.caveats:
            console.print(f"- {caveat}", highlight=False)


def measure(lab: Lab, say: Callable[[str], None]) -> Report:
    """Measure between alice and bob of a lab, whose kernels are idle."""
    job = lab.bob.start("from rdmalab import measure\nserved = measure.server(idle_s=60)")
    alice = lab.alice.kernel
    try:
        alice.run(HOST_CODE)
        for repeat in range(REPEATS):
            say(f"round {repeat + 1} of {REPEATS}")
            for kind in NAMES:
                for side in ("python", "tool")[:: 1 if repeat % 2 else -1]:
                    alice.run(f"take({kind!r}, {side!r}, {SIZE_BYTES}, {ROUNDS})")
        alice.run(f"rows = [row(kind) for kind in {list(NAMES)}]")
        rows = [Row(**facts) for facts in lab.alice.get("rows")]
        alice.run("session.close()")
        job.result()
    finally:
        job.stop()
    return Report(lab.state.accel, lab.state.accel_why, lab.state.backend, rows)


def run(say: Callable[[str], None]) -> Report:
    """Measure on hosts of its own, which are gone afterwards."""
    lab_id = f"bench-{os.getpid()}"
    try:
        return measure(labs.up(lab=lab_id, say=say), say)
    finally:
        labs.down(lab_id)
