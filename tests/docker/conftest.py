"""The container image, built once from this checkout for all of these tests."""

from __future__ import annotations

import pytest

from .engine import Engine, build, why_no_engine

TAG = "rdmalab:test"


@pytest.fixture(scope="session")
def engine() -> Engine:
    """The machine's Docker engine."""
    why = why_no_engine()
    if why:
        pytest.skip(why)
    return Engine()


@pytest.fixture(scope="session")
def image(engine: Engine) -> str:
    """The image's tag. It stays when the tests are done: a next build takes seconds then."""
    build(engine, TAG)
    return TAG
