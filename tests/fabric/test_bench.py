"""The benchmarks run: each part of bench/ that no other test runs, made small.

What they measure is not looked at: that depends on the machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import rdmalab
from rdmalab import lab as labs
from rdmalab import state

from ..grading.many import NAME, make_course

pytestmark = [pytest.mark.fabric, pytest.mark.long, pytest.mark.timeout(300)]

BENCH = Path(__file__).parents[2] / "bench"


BARE = """
import promises
print(promises.bare_restore())
"""
FEW_CELLS = """
import sys
import promises, rdmalab
promises.CELLS = 2
row = promises.cells(rdmalab.up(lab=sys.argv[1]))
print(row.ours, row.reference)
"""


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def test_the_bare_restore_ends_with_the_hosts_ready_and_leaves_nothing() -> None:
    rdmalab.up(lab="saved")  # and so there is a snapshot
    labs.down("saved")
    done = run("-c", BARE, PYTHONPATH=str(BENCH))
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) > 0
    assert "bare" not in state.lab_ids()


def test_a_cell_is_measured_beside_the_same_kernel(lab: rdmalab.Lab) -> None:
    """In a process of its own, since it makes that process an IPython shell."""
    done = run("-c", FEW_CELLS, lab.state.lab, PYTHONPATH=str(BENCH))
    assert done.returncode == 0, done.stderr
    ours, reference = map(float, done.stdout.split())
    assert ours > 0
    assert reference > 0


def test_grading_is_measured_beside_the_cells_alone(tmp_path: Path) -> None:
    """Two copies of a lab of one task; the exit code says only whether the promise is kept."""
    make_course(tmp_path / "labs", {"one": "alice"})
    words = ("--lab", NAME[:2], "--copies", "2", "--beside", "2")
    done = run(str(BENCH / "grading.py"), *words, RDMALAB_LABS=str(tmp_path / "labs"))
    assert "Traceback" not in done.stderr, done.stderr
    assert "grading / pure execution" in done.stdout
    assert done.returncode in (0, 1)
