"""Completion statuses in words; tests/fabric/test_verbs_statuses.py holds them against a device."""

from __future__ import annotations

import pytest

from rdmalab.hostside.statuses import STATUSES, explain, status_name


def test_every_status_is_there_once_and_in_order() -> None:
    assert list(STATUSES) == list(range(24))
    names = [status.name for status in STATUSES.values()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("code", STATUSES)
def test_every_error_says_meaning_and_cause(code: int) -> None:
    text = explain(code)
    assert text.startswith(f"{status_name(code)}: {STATUSES[code].means}")
    assert code == 0 or "Usual cause: " in text


def test_what_a_learner_meets_also_says_where_to_look() -> None:
    for name in ("LOC_PROT_ERR", "WR_FLUSH_ERR", "REM_ACCESS_ERR", "RETRY_EXC_ERR"):
        assert "Look at: " in explain(f"IBV_WC_{name}"), name


def test_an_unknown_status_keeps_its_number() -> None:
    assert "99" in explain(99)
    with pytest.raises(ValueError, match="is no status"):
        explain("IBV_WC_NONSENSE")
