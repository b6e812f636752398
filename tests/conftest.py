"""What holds for all tests: with RDMALAB_REQUIRE_ALL=1 a part that is missing is a failure.

On a learner's machine a test that lacks Docker or a browser is skipped and says so. In CI nobody
reads skips, so there every one of them fails, except where the test says that its skip tells of no
missing part: ``@pytest.mark.may_skip("only on arm64")``.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Generator

import pytest

# A run-time folder of this run's own: tests never meet, or stop, a lab that somebody uses.
if "RDMALAB_RUNTIME_DIR" not in os.environ:
    os.environ["RDMALAB_RUNTIME_DIR"] = tempfile.mkdtemp(prefix="rdmalab-test-", dir="/tmp")
    OWN_FOLDER: str | None = os.environ["RDMALAB_RUNTIME_DIR"]
else:
    OWN_FOLDER = None
# Each of several processes that share the tests out has hosts of its own.
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    os.environ["RDMALAB_RUNTIME_DIR"] += f"/{worker}"
    os.makedirs(os.environ["RDMALAB_RUNTIME_DIR"], mode=0o700, exist_ok=True)
os.environ.pop("RDMALAB_LAB", None)

# A shell that starts us in the background has SIGINT ignored, and so would everything that the
# tests start and then interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

REQUIRE_ALL = os.environ.get("RDMALAB_REQUIRE_ALL", "") not in ("", "0")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if (
        report.skipped
        and not hasattr(report, "wasxfail")
        and not item.get_closest_marker("may_skip")
    ):
        _forbid(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if report.skipped:
        _forbid(report)
    return report


def _forbid(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turn a skip into a failure that still gives the skip's reason."""
    if REQUIRE_ALL:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"RDMALAB_REQUIRE_ALL is set, so this may not be missing: {reason}"


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """Stop what a failing test left, and take the run's own folder away."""
    from rdmalab import lab, state

    for name in state.lab_ids():
        lab.down(name)
    if OWN_FOLDER is not None:
        shutil.rmtree(OWN_FOLDER, ignore_errors=True)
