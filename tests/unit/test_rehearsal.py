"""What `rdmalab check` computes itself, against those who define it."""

from __future__ import annotations

from pathlib import Path

import nbformat
from nbgrader.utils import compute_checksum

from rdmalab.grading.rehearsal import checksum

LABS = Path(__file__).parents[2] / "labs"


def test_the_checksum_of_every_cell_is_nbgraders() -> None:
    """Of tasks, checks and read-only cells of all labs, and of a cell with points it has not."""
    seen = 0
    for path in sorted(LABS.glob("*.ipynb")):
        for cell in nbformat.read(path, as_version=4).cells:
            if "nbgrader" in cell.metadata:
                assert checksum(cell) == compute_checksum(cell), (path.name, cell.id)
                cell.source += "# edited"
                assert checksum(cell) == compute_checksum(cell)
                seen += 1
    assert seen > 50
