"""Percentiles and their bands, against numpy and against samples whose percentile is known."""

from __future__ import annotations

import numpy as np
import pytest

from rdmalab.hostside.percentiles import band, percentile, summary

SHARES = (0.01, 0.25, 0.5, 0.75, 0.9, 0.99)


@pytest.mark.parametrize("count", [1, 2, 7, 100, 1000])
def test_a_percentile_is_numpys_inverse_of_the_distribution(count: int) -> None:
    samples = np.random.default_rng(count).exponential(100, count)
    for p in SHARES:
        assert percentile(samples, p) == np.quantile(samples, p, method="inverted_cdf")


def test_a_percentile_is_one_of_the_samples_and_leaves_them_as_they_are() -> None:
    samples = [3.0, 1.0, 2.0, 10.0]
    assert percentile(samples, 0.5) == 2.0 and percentile(samples, 0.9) == 10.0
    assert samples == [3.0, 1.0, 2.0, 10.0]


@pytest.mark.parametrize("p", [0.5, 0.9, 0.99])
def test_a_band_holds_the_true_percentile_as_often_as_it_says(p: float) -> None:
    """Of 400 bands at 95 %, some 380 hold it; 4 standard deviations below that are 363."""
    draw = np.random.default_rng(7)
    true = -100 * np.log(1 - p)  # of the exponential distribution with mean 100
    held = 0
    for _ in range(400):
        low, high = band(draw.exponential(100, 1000), p)
        assert low is not None and high is not None and low <= high
        held += low <= true <= high
    assert held >= 363


def test_where_there_are_too_few_samples_a_band_says_so() -> None:
    low, high = band(range(1000), 0.999)
    assert low is not None and high is None
    assert band([5.0], 0.5) == (None, None)


def test_the_summary_is_plain_data_with_a_band_for_each_percentile() -> None:
    told = summary(np.arange(1, 1001, dtype=float))
    assert (told["count"], told["min"], told["mean"], told["max"]) == (1000, 1.0, 500.5, 1000.0)
    assert [told[name] for name in ("p50", "p90", "p99", "p999")] == [500.0, 900.0, 990.0, 999.0]
    for name in ("p50", "p90", "p99"):
        low, high = told[f"{name}_band"]
        assert low < told[name] < high
    assert all(type(value) in (int, float, tuple) for value in told.values())
