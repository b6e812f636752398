"""Plain data on its way between a notebook and a host: JSON, bytes, numpy arrays.

The one module that both halves import. ``pack`` makes message content and binary buffers of a
value, ``unpack`` the value of these.
"""

from __future__ import annotations

import json
from typing import Any

__all__ = ["pack", "refusal", "unpack"]


def refusal(ename: str, evalue: str) -> dict[str, Any]:
    """The content of an error reply."""
    return {"status": "error", "ename": ename, "evalue": evalue, "traceback": []}


def pack(value: Any) -> tuple[dict[str, Any], list[Any]]:
    """Message content and buffers for a value. ``TypeError`` for what is no plain data."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"status": "ok", "kind": "bytes"}, [bytes(value)]
    if type(value).__module__ == "numpy" and hasattr(value, "dtype"):
        if value.dtype.hasobject:
            raise TypeError("numpy arrays of objects do not travel; use numbers or bytes")
        array = value.copy(order="C")
        facts = {"dtype": array.dtype.str, "shape": list(array.shape)}
        return {"status": "ok", "kind": "numpy", **facts}, [array.tobytes()]
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        raise TypeError(
            f"a {type(value).__name__} does not travel; plain data does "
            "(numbers, text, lists, dicts, bytes, numpy arrays)"
        ) from None
    return {"status": "ok", "kind": "json", "value": json.loads(text)}, []


def unpack(content: dict[str, Any], buffers: list[Any]) -> Any:
    """The value that :func:`pack` packed."""
    if content["kind"] == "bytes":
        return bytes(buffers[0])
    if content["kind"] == "numpy":
        import numpy

        flat = numpy.frombuffer(bytearray(buffers[0]), dtype=content["dtype"])
        return flat.reshape(content["shape"])
    return content["value"]
