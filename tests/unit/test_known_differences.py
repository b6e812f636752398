"""docs/soft-roce.md has each difference once, in the words of the tables that tests hold it by."""

from __future__ import annotations

from pathlib import Path

import pytest

from rdmalab.hostside.qpstate import DIFFERENCES
from rdmalab.hostside.statuses import STATUSES

PAGE = (Path(__file__).parents[2] / "docs" / "soft-roce.md").read_text(encoding="utf-8")
ROWS = [
    *(f"| {d.subject} | {d.specification} | {d.here} | {d.so} |" for d in DIFFERENCES.values()),
    *(f"| `{s.name}` | {s.means} | {s.soft_roce} |" for s in STATUSES.values() if s.soft_roce),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip())
def test_the_page_has_each_difference_once(row: str) -> None:
    assert PAGE.splitlines().count(row) == 1, f"docs/soft-roce.md should have the line\n{row}"


def test_the_page_tells_of_no_other_state_or_status() -> None:
    """A row that no table has any more is out of date."""
    parts = PAGE.partition("## States")[2].partition("## Other")[0]
    listed = [line for line in parts.splitlines() if line.startswith("| ")]
    heads = [line for line in listed if line.startswith(("| subject", "| status"))]
    assert sorted(listed) == sorted([*ROWS, *heads])
