"""The container image, built once from this checkout for all of these tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from .engine import Engine, build, why_no_engine


@pytest.fixture(scope="session")
def engine() -> Engine:
    """The machine's Docker engine."""
    why = why_no_engine()
    if why:
        pytest.skip(why)
    return Engine()


@pytest.fixture(scope="session")
def image(engine: Engine) -> Iterator[str]:
    """The image by a name of this run's own, which goes in the end.

    The engine's build cache keeps what it was made of: a next build takes seconds.
    """
    tag = f"rdmalab:test{os.getpid()}"
    build(engine, tag)
    yield tag
    engine("rmi", tag)
