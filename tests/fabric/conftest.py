"""Hosts for the tests: one pair for those that leave it as it was, labs of their own for others."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import rdmalab
from rdmalab import lab as labs
from rdmalab.remote import lab_gone

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def start_shared() -> Iterator[Callable[[], rdmalab.Lab]]:
    """Give the shared pair; where a test has ended it, the next one gets another.

    So one fault fails one test. That a machine ended is an error of the run in any case.
    """
    started: list[rdmalab.Lab] = []
    gone: list[str] = []

    def start() -> rdmalab.Lab:
        if started and not started[-1].alive():
            gone.append(str(lab_gone(started.pop().state)))
        started.append(rdmalab.up(lab="shared"))
        return started[-1]

    yield start
    labs.down("shared")
    assert not gone, gone


@pytest.fixture
def shared_lab(start_shared: Callable[[], rdmalab.Lab]) -> rdmalab.Lab:
    """alice and bob, started once for all tests that do not harm them."""
    return start_shared()


@pytest.fixture
def lab(shared_lab: rdmalab.Lab) -> rdmalab.Lab:
    """The shared pair with fresh kernels."""
    for host in shared_lab.hosts:
        host.restart()
    return shared_lab


@pytest.fixture
def new_lab() -> Iterator[Callable[..., rdmalab.Lab]]:
    """Start labs of a test's own: ``new_lab("alice", "carol")``; stopped at its end."""
    started: list[str] = []

    def start(*names: str) -> rdmalab.Lab:
        ident = f"test{next(_numbers)}"
        started.append(ident)
        return rdmalab.up(names, lab=ident)

    yield start
    for ident in started:
        labs.down(ident)


class Ran(NamedTuple):
    """How a command on a host or in the guest ended: exit code, standard output, standard error."""

    code: int
    out: str
    err: str


def run_command(lab: rdmalab.Lab, op: str, script: str, **args: Any) -> Ran:
    said: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
    code = -1000
    for item in lab.remote.stream(op, ["sh", "-c", script], **args):
        if isinstance(item, int):
            code = item
        else:
            said[item[0]].append(item[1])
    out, err = (b"".join(said[name]).decode(errors="replace") for name in ("stdout", "stderr"))
    return Ran(code, out, err)


@pytest.fixture(scope="session")
def sh() -> Callable[..., Ran]:
    """A shell line on a host, as its user: ``sh(lab, "alice", "ls")``; ``root=True`` as --root."""

    def run(lab: rdmalab.Lab, host: str, script: str, *, root: bool = False) -> Ran:
        return run_command(lab, "exec", script, host=host, root=root, timeout_s=90)

    return run


@pytest.fixture(scope="session")
def guest() -> Callable[..., Ran]:
    """A shell line in the guest with all rights, as a witness: ``guest(lab, "ps ax")``."""

    def run(lab: rdmalab.Lab, script: str) -> Ran:
        return run_command(lab, "root", script, timeout_s=90)

    return run


def our_processes() -> set[int]:
    """Pids of QEMUs (and their like) that run for this run's run-time folder."""
    mark = os.environb[b"RDMALAB_RUNTIME_DIR"]
    found = set()
    for proc in Path("/proc").glob("[0-9]*"):
        try:
            line = (proc / "cmdline").read_bytes()
        except OSError:
            continue
        if b"qemu" in line and mark in line:
            found.add(int(proc.name))
    return found
