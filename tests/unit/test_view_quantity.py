"""Amounts in words and the ticks of axes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdmalab.view.quantity import TICKS, log_ticks, quantity


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (1, "B", "1 B"),
        (1000, "B", "1,000 B"),
        (1024, "B", "1 KiB"),
        (1536, "B", "1.5 KiB"),
        (65536, "B", "64 KiB"),
        (64 << 20, "B", "64 MiB"),
        (0, "us", "0 µs"),
        (0, "ms", "0 ms"),
        (0.85, "us", "850 ns"),
        (84, "us", "84 µs"),
        (84.26, "us", "84.3 µs"),
        (999.9, "us", "1 ms"),
        (1500, "us", "1.5 ms"),
        (2, "s", "2 s"),
        (375, "ms", "375 ms"),
        (2000, "", "2,000"),
        (466, "switches", "466 switches"),
        (0, "", "0"),
        (0.05, "", "0.05"),
        (-12.34, "", "-12.3"),
    ],
)
def test_an_amount_reads_as_a_person_writes_it(value: float, unit: str, text: str) -> None:
    assert quantity(value, unit) == text


def test_sizes_stand_at_powers_of_two() -> None:
    assert log_ticks(1, 65536, "B") == [1, 4, 16, 64, 256, 1024, 4096, 16384, 65536]
    assert log_ticks(4096, 16384, "B") == [4096, 8192, 16384]


def test_times_stand_at_round_values() -> None:
    assert log_ticks(60, 900) == [100, 200, 500]
    assert log_ticks(30, 3000) == pytest.approx([50, 100, 200, 500, 1000, 2000])
    assert log_ticks(84, 88) == pytest.approx([84, 85, 86, 87, 88])
    assert log_ticks(1, 1e8) == pytest.approx([10.0**n for n in range(9)])


@given(st.floats(0.01, 1e6), st.floats(1.3, 1e7), st.sampled_from(["", "us", "B"]))
def test_ticks_lie_within_the_axis_and_are_few(low: float, factor: float, unit: str) -> None:
    high = low * factor
    ticks = log_ticks(low, high, unit)
    assert len(ticks) <= TICKS
    assert ticks == sorted(set(ticks))
    assert all(low * 0.99 <= tick <= high * 1.01 for tick in ticks)
    assert len(ticks) > 1, "one tick is no scale"
    if unit == "B" and factor > 4:
        steps = {round(math.log2(b / a)) for a, b in zip(ticks, ticks[1:], strict=False)}
        assert len(steps) == 1
