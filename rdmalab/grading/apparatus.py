"""What the lab gave its checks to work with: functions, imports, constants of the given cells.

A check uses names that earlier cells of the lab have made (``attempt``, ``shown``, ``judged``). A
submission can make them anew and answer what it likes. So a check takes them along: the functions,
imports and constants (``NAMES_LIKE_THIS``) that it needs, and those that these need, as the lab has
handed them out.

Measured values (``facts = measure()``) are not among them: they are what the check looks at.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeGuard

__all__ = ["Apparatus", "body_of", "hosts_of"]

BUILTINS = frozenset(dir(builtins))
WORD = re.compile(r"[A-Za-z_]\w*")
LIKE_CODE = re.compile(r"\w\(|\w\[| = ")  # code for a host, in pieces if it is an f-string
Definition = ast.FunctionDef | ast.Import | ast.ImportFrom | ast.Assign


def hosts_of(source: str) -> tuple[str, ...]:
    """Where a cell of the lab's runs: the hosts that its ``%%on`` names, or none (the desk)."""
    first, _, _ = source.partition("\n")
    words = first.split() if first.startswith("%%on ") else [""]
    return tuple(word for word in words[1:] if not word.startswith("-"))


def body_of(source: str) -> str:
    """A cell without its ``%%on`` line, which is kept empty so that lines keep their numbers."""
    first, newline, rest = source.partition("\n")
    return newline + rest if first.startswith("%%on ") else source


def parsed(source: str) -> list[ast.stmt]:
    """The statements of a cell of the lab's; its line magics and shell lines are left out."""
    lines = body_of(source).splitlines()
    text = "\n".join("" if line.lstrip()[:1] in ("%", "!") else line for line in lines)
    try:
        return ast.parse(text).body
    except SyntaxError:
        return []


def names_bound(node: ast.stmt) -> Iterator[str]:
    """The names that a function, an import or a constant makes."""
    if isinstance(node, ast.FunctionDef):
        yield node.name
    elif constant(node):
        yield ast.unparse(node.targets[0])
    elif isinstance(node, ast.Import | ast.ImportFrom):
        for alias in node.names:
            yield alias.asname or alias.name.partition(".")[0]


def words_of(node: ast.AST) -> set[str]:
    """All names in a piece of code, and in its strings that may be code for a host."""
    found = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    for inner in ast.walk(node):
        text = inner.value if isinstance(inner, ast.Constant) else None
        if isinstance(text, str) and LIKE_CODE.search(text):
            found.update(WORD.findall(text))
    return found - BUILTINS


def constant(node: ast.stmt) -> TypeGuard[ast.Assign]:
    """Whether a statement gives a name in capitals a value that cannot change."""
    if not isinstance(node, ast.Assign) or len(node.targets) != 1:
        return False
    target = node.targets[0]
    if not isinstance(target, ast.Name) or not target.id.isupper():
        return False
    kinds = (ast.Constant, ast.Tuple, ast.UnaryOp, ast.USub, ast.Load)
    return all(isinstance(inner, kinds) for inner in ast.walk(node.value))


def portable(node: ast.stmt) -> bool:
    """Whether a definition can be made a second time without changing what it is about."""
    if constant(node):
        return True
    if isinstance(node, ast.FunctionDef):
        inside = list(ast.walk(node))
        return not node.decorator_list and not any(isinstance(n, ast.Global) for n in inside)
    return isinstance(node, ast.Import | ast.ImportFrom)


@dataclass
class Apparatus:
    """What has been handed out so far, by host (the desk is the empty string)."""

    made: dict[str, dict[str, Definition]] = field(default_factory=dict)

    def hear(self, source: str, *, task: bool = False) -> None:
        """A cell of the lab's has come by; a task's names are the learner's to make."""
        for host in hosts_of(source) or ("",):
            known = self.made.setdefault(host, {})
            for node in parsed(source):
                for name in names_assigned(node):
                    known.pop(name, None)
                if task:
                    for name in names_bound(node):
                        known.pop(name, None)
                elif portable(node):
                    assert isinstance(node, Definition)
                    known.update((name, node) for name in names_bound(node))

    def needed(self, words: Iterable[str], host: str) -> tuple[str, set[str]]:
        """The definitions behind these words on a host, as source; and the words they use."""
        known, wanted = self.made.get(host, {}), set(words)
        queue, found = list(wanted), dict[int, Definition]()
        while queue:
            node = known.get(queue.pop())
            if node is not None and id(node) not in found:
                found[id(node)] = node
                more = words_of(node) - wanted
                wanted |= more
                queue += more
        in_order = [node for node in dict.fromkeys(known.values()) if id(node) in found]
        return "\n".join(ast.unparse(node) for node in in_order), wanted

    def for_check(self, source: str) -> dict[str, str]:
        """What a check takes along: definitions by host, those of its own host included."""
        words = set().union(*(words_of(node) for node in parsed(source)), ())
        own = hosts_of(source) or ("",)
        found = {host: self.needed(words, host) for host in own}
        for _, more in found.values():
            words |= more
        if own == ("",):
            found |= {host: self.needed(words, host) for host in self.made if host}
        return {host: text for host, (text, _) in found.items() if text}


def names_assigned(node: ast.stmt) -> Iterator[str]:
    """The names that a statement at the top of a cell gives another meaning."""
    if constant(node) or isinstance(node, ast.FunctionDef | ast.Import | ast.ImportFrom):
        return
    if isinstance(node, ast.ClassDef):
        yield node.name
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            yield inner.id
