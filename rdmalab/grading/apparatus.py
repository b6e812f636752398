"""The lab's own cells as plain Python: where each runs, and what it defines there."""

from __future__ import annotations

import ast
import re

from ..hostside import checkcode
from ..magics import parse_on

__all__ = ["DESK", "body_of", "hosts_of", "portable"]

MAGIC = re.compile(r"^(\s*)[%!].*$", re.MULTILINE)
DESK = ""  # where cells run that name no host


def hosts_of(source: str) -> tuple[str, ...]:
    """Where a cell of the lab's runs: the hosts that its ``%%on`` names, or none (the desk)."""
    first, _, _ = source.partition("\n")
    return tuple(parse_on(first[5:]).hosts) if first.startswith("%%on ") else ()


def body_of(source: str) -> str:
    """A cell as plain Python: its ``%%on`` line is empty, so that lines keep their numbers, and
    other magics and shell lines are left out."""
    first, newline, rest = source.partition("\n")
    return MAGIC.sub(r"\1pass", newline + rest if first.startswith("%%on ") else source)


def portable(given: str) -> str:
    """Of definitions those that can be made a second time in the learner's own name space.

    No classes, of which there may be objects, and no functions that change names around them.
    """
    body = [
        node
        for node in checkcode.parse(given).body
        if not isinstance(node, ast.ClassDef)
        and not any(isinstance(inner, ast.Global) for inner in ast.walk(node))
    ]
    return ast.unparse(ast.Module(body=body, type_ignores=[]))
