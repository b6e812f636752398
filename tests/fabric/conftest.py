"""Hosts for the tests: one pair for those that leave it as it was, labs of their own for others."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import rdmalab
from rdmalab import lab as labs

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def shared_lab() -> Iterator[rdmalab.Lab]:
    """alice and bob, started once for all tests that do not harm them."""
    lab = rdmalab.up(lab="shared")
    yield lab
    lab.down()


@pytest.fixture
def lab(shared_lab: rdmalab.Lab) -> Iterator[rdmalab.Lab]:
    """The shared pair with fresh kernels."""
    for host in shared_lab.hosts:
        host.restart()
    yield shared_lab


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
