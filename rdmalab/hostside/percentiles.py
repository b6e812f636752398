"""What samples of a latency say: percentiles, and how sure they are."""

from __future__ import annotations

import math
from typing import Any

import numpy

__all__ = ["band", "percentile", "summary"]

TAIL = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}
Z95 = 1.96  # standard deviations either side of the middle that hold 95 % of a normal distribution


def percentile(samples: Any, p: float) -> float:
    """The smallest sample that at least a share ``p`` (0 to 1) of all samples does not exceed."""
    ordered = numpy.sort(numpy.asarray(samples))
    return float(ordered[max(math.ceil(p * len(ordered)), 1) - 1])


def band(samples: Any, p: float) -> tuple[float | None, float | None]:
    """Between these lies the percentile of *all* rounds like these, with 95 % confidence.

    From the ranks of the sorted samples alone, whatever their distribution (the normal
    approximation of the binomial). None where there are too few samples to say. It holds for
    rounds that do not depend on each other; on a busy machine they do, so repeat whole runs too.
    """
    ordered = numpy.sort(numpy.asarray(samples))
    count = len(ordered)
    spread = Z95 * math.sqrt(count * p * (1 - p))
    low, high = math.floor(count * p - spread), math.ceil(count * p + spread) + 1
    return (
        float(ordered[low - 1]) if low >= 1 else None,
        float(ordered[high - 1]) if high <= count else None,
    )


def summary(lat_us: Any) -> dict[str, Any]:
    """``count``, ``min``, ``mean``, ``max``; ``p50`` to ``p999``, each with a :func:`band`."""
    samples = numpy.asarray(lat_us)
    told: dict[str, Any] = {"count": len(samples), "min": float(samples.min())}
    told |= {"mean": float(samples.mean()), "max": float(samples.max())}
    for name, p in TAIL.items():
        told[name] = percentile(samples, p)
        told[f"{name}_band"] = band(samples, p)
    return told
