"""Amounts in words: ``64 KiB``, ``1.5 ms``, ``2,000``; and where an axis of them has its ticks."""

from __future__ import annotations

import math

__all__ = ["log_ticks", "quantity", "size_text", "time_text"]

SIZES = ("B", "KiB", "MiB", "GiB", "TiB")
TIMES_US = (("s", 1e6), ("ms", 1e3), ("µs", 1.0), ("ns", 1e-3))
MICROSECONDS = {"ns": 1e-3, "us": 1.0, "µs": 1.0, "ms": 1e3, "s": 1e6}
TICKS = 9  # that fit beside each other
GAP = 0.11  # of the axis, between two of them at least


def significant(value: float) -> str:
    """Three significant digits, no exponent, no zeros at the end: ``0.05``, ``12.3``, ``1,230``."""
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{round(value, digits):,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def size_text(size_bytes: float) -> str:
    """Bytes in binary units: ``1 B``, ``1 KiB``, ``64 KiB``, ``1.5 MiB``."""
    power = 0
    while abs(size_bytes) >= 1024 and power < len(SIZES) - 1:
        size_bytes, power = size_bytes / 1024, power + 1
    return f"{significant(size_bytes)} {SIZES[power]}"


def time_text(time_us: float) -> str:
    """Microseconds in the unit that suits them: ``850 ns``, ``84 µs``, ``1.5 ms``, ``2 s``."""
    fitting = (entry for entry in TIMES_US if abs(time_us) >= entry[1] * 0.9995)
    unit, factor = next(fitting, TIMES_US[-1])
    return f"{significant(time_us / factor)} {unit}"


def quantity(value: float, unit: str = "") -> str:
    """A value with its unit: ``B`` and the times are scaled, ``""`` is a plain number."""
    if unit == "B":
        return size_text(value)
    if unit in MICROSECONDS and value:
        return time_text(value * MICROSECONDS[unit])
    return f"{significant(value)} {'µs' if unit == 'us' else unit}".rstrip()


def log_ticks(low: float, high: float, unit: str = "") -> list[float]:
    """Round values for a logarithmic axis from ``low`` to ``high``, with room for their words.

    Sizes stand at powers of two; everything else at 1, 2, 5 of each decade, or at more or fewer. A
    short axis has them at equal steps.
    """
    if unit == "B":
        first, last = math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9)
        step = max(1, math.ceil((last - first + 1) / TICKS))
        sizes = [2.0**power for power in range(first, last + 1, step)]
        return sizes if len(sizes) > 1 else even_ticks(low, high)
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    for steps in ((1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        ticks = [step * 10.0**decade for decade in decades for step in steps]
        ticks = [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]
        gaps = (b / a for a, b in zip(ticks, ticks[1:], strict=False))
        if len(ticks) > 1 and math.log(min(gaps)) >= GAP * math.log(high / low):
            return ticks
    return even_ticks(low, high) if len(ticks) < 2 else ticks[:: math.ceil(len(ticks) / TICKS)]


def even_ticks(low: float, high: float) -> list[float]:
    """A few round values at equal steps."""
    raw = (high - low) / 5
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * one for one in (1, 2, 5, 10) if unit * one >= raw * 0.9999)
    return [
        step * n for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    ]
