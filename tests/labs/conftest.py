"""Hosts for the notebooks of one lab's tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from .learner import own_hosts


@pytest.fixture(scope="module", autouse=True)
def hosts(request: pytest.FixtureRequest) -> Iterator[str]:
    """The id of the lab that this file's notebooks use; the first notebook starts it."""
    name = request.path.stem.replace("_", "-")
    with own_hosts(f"{name}-{os.getpid()}") as lab_id:
        yield lab_id
