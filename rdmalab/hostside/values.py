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


def check_keys(value: Any) -> None:
    """``TypeError`` for a dict with keys that JSON would silently turn into text."""
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} is no text")
    if isinstance(value, (dict, list, tuple)):
        for inner in value.values() if isinstance(value, dict) else value:
            check_keys(inner)


def pack(value: Any) -> tuple[dict[str, Any], list[Any]]:
    """Message content and buffers for a value. ``TypeError`` for what is no plain data."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"status": "ok", "kind": "bytes"}, [bytes(value)]
    if type(value).__module__ == "numpy" and hasattr(value, "dtype"):
        if value.dtype.hasobject or value.dtype.fields:
            raise TypeError("numpy arrays of objects or records do not travel; use plain numbers")
        array = value.copy(order="C")
        facts = {"dtype": array.dtype.str, "shape": list(array.shape)}
        return {"status": "ok", "kind": "numpy", **facts}, [array.tobytes()]
    try:
        check_keys(value)
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(
            f"this {type(value).__name__} does not travel; plain data does (numbers, text, lists,"
            f" dicts with text as keys, bytes, numpy arrays): {error}"
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
