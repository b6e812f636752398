"""Hosts for the notebooks of one lab's tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from nbformat import NotebookNode

from .learner import attempts, own_hosts, selected


@pytest.fixture(scope="module", autouse=True)
def hosts(request: pytest.FixtureRequest) -> Iterator[str]:
    """The id of the lab that this file's notebooks use; the first notebook starts it."""
    name = request.path.stem.replace("_", "-")
    with own_hosts(f"{name}-{os.getpid()}") as lab_id:
        yield lab_id


@pytest.fixture(scope="module")
def tried_again(
    request: pytest.FixtureRequest, hosts: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, NotebookNode]:
    """The file's RETRIES: answers tried one after the other, without the cells before the task."""
    tries = selected(request, request.module.RETRIES)
    return attempts(request.module.NAME, tries, tmp_path_factory.mktemp("again"))
