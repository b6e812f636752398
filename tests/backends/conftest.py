"""One test machine for all tests of the backends that need a kernel with rxe, or Docker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .machine import Machine, started


@pytest.fixture(scope="session")
def machine() -> Iterator[Machine]:
    """The machine; its disks are built first if need be. Tests clean up what they make in it."""
    with started() as running:
        yield running
