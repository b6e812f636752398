"""Hosts for the notebooks of one lab's tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from nbformat import NotebookNode

from .learner import attempts, learners_folder, own_hosts, selected


@pytest.fixture(scope="module", autouse=True)
def hosts(request: pytest.FixtureRequest) -> Iterator[str]:
    """The id of the lab that this file's notebooks use; the first notebook starts it."""
    name = request.path.stem.replace("_", "-")
    with own_hosts(f"{name}-{os.getpid()}") as lab_id:
        yield lab_id


@pytest.fixture(scope="module")
def tried(
    request: pytest.FixtureRequest, hosts: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, NotebookNode]:
    """The solved lab, run once, with the file's TRIES and RETRIES at their tasks.

    ``BEGIN``, where a file has it: where learners are told to begin again, by task.
    """
    module = request.module
    tries = selected(request, [*module.TRIES, *module.RETRIES])
    folder = learners_folder(tmp_path_factory.mktemp("tried"))
    return attempts(module.NAME, tries, folder, getattr(module, "BEGIN", {}))


@pytest.fixture(scope="module")
def done(tried: dict[str, NotebookNode]) -> NotebookNode:
    """The solved lab itself, as it ran around all attempts."""
    return tried[""]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder as a learner has it."""
    return learners_folder(tmp_path)
