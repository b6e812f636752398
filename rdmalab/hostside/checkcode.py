"""A check's source before it runs: which names it reads and makes, and how it calls.

Pure: it looks at syntax trees only, in the guest and beside it. A check is compiled so that each
call and each attribute goes through two functions of the judge (:data:`CALL`, :data:`ATTRIBUTE`),
which send what is a submission's own to a stack of its own (see ``judge``).
"""

from __future__ import annotations

import ast
import builtins
import threading
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType

__all__ = [
    "ATTRIBUTE",
    "CALL",
    "CheckError",
    "bound",
    "compile_check",
    "compile_definition",
    "definitions",
    "free",
    "imported",
    "made_by",
    "mentioned",
    "modules_of",
    "parse",
    "reached",
]

CALL = "(call)"  # no name that a source could hold
ATTRIBUTE = "(attribute)"
FILE = "<check>"
OWN_STACK = frozenset({"super", "globals", "locals", "vars", "dir", "eval", "exec"})  # know frames
BUILTIN = frozenset(dir(builtins)) | {"display", "get_ipython"}
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
PLAIN = (  # what constants are written with
    *(ast.Constant, ast.Tuple, ast.List, ast.Dict, ast.Set, ast.Attribute, ast.BinOp, ast.UnaryOp),
    *(ast.Name, ast.expr_context, ast.operator, ast.unaryop),
)
DEFINITION = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)

# CPython 3.11 counts how deep a tree is in one place for all threads: two that parse at a time may
# end in "SystemError: AST constructor recursion depth mismatch".
_parsing = threading.Lock()


class CheckError(ValueError):
    """A check's source that cannot be judged; the text says why."""


def parse(source: str) -> ast.Module:
    """The tree of a check or of definitions. :class:`CheckError` for what is no plain Python."""
    try:
        with _parsing:
            return ast.parse(source, FILE)
    except (SyntaxError, ValueError) as error:
        raise CheckError(f"this check is no plain Python: {error}") from None


def targets(node: ast.AST) -> Iterator[str]:
    """The names that one statement makes where it stands, with what stands inside it."""
    for inner in same_scope(node):
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, (ast.Store, ast.Del)):
            yield inner.id
        elif isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield inner.name
        elif isinstance(inner, ast.alias):
            yield inner.asname or inner.name.split(".")[0]
        elif isinstance(inner, ast.ExceptHandler) and inner.name:
            yield inner.name


def same_scope(node: ast.AST) -> Iterator[ast.AST]:
    """A node and all below it, but not the bodies of functions, classes and comprehensions."""
    yield node
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
        return
    if isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
        for inner in ast.walk(node):  # := makes a name outside of it
            if isinstance(inner, ast.NamedExpr):
                yield inner.target
        return
    for child in ast.iter_child_nodes(node):
        yield from same_scope(child)


def bound(tree: ast.Module) -> set[str]:
    """The names that a source makes at its top level, or through ``global`` in a function."""
    made = {name for node in tree.body for name in targets(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            made |= set(node.names)
    return made


def made_by(source: str) -> set[str]:
    """As :func:`bound`; nothing for a source that is no Python (a learner's own)."""
    try:
        return bound(parse(source))
    except CheckError:
        return set()


def imported(tree: ast.Module) -> set[str]:
    """The names that a source imports or defines at its top level."""
    body: list[ast.stmt] = [node for node in tree.body if isinstance(node, DEFINITION)]
    return bound(ast.Module(body=body, type_ignores=[]))


def modules_of(tree: ast.AST) -> set[str]:
    """The packages that a source imports."""
    names = [a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names]
    names += [n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    return {name.split(".")[0] for name in names}


def mentioned(tree: ast.AST) -> set[str]:
    """Every name that a source reads, and texts that could be names (``globals()["qp"]``)."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value.isidentifier():
                names.add(node.value)
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


def reached(check: ast.Module, given: ast.Module) -> set[str]:
    """The names that a check takes from elsewhere, itself or in the lab's definitions it uses.

    What it makes before it reads it is not among them, unless a definition reads it.
    """
    uses: dict[str, set[str]] = {}
    for node in given.body:
        for name in targets(node):
            uses[name] = uses.get(name, set()) | mentioned(node)
    found = free(check)
    seen: set[str] = set()
    waiting = mentioned(check)
    while waiting:
        seen |= waiting
        more = {name for known in waiting for name in uses.get(known, ())}
        found |= more
        waiting = more - seen
    return found


def free(tree: ast.Module) -> set[str]:
    """What a source reads before it has made it itself, roughly: statement by statement."""
    found: set[str] = set()
    have: set[str] = set()
    for node in tree.body:
        made = set(targets(node))
        hidden = have | BUILTIN | {arg.arg for arg in ast.walk(node) if isinstance(arg, ast.arg)}
        first = node.value if isinstance(node, ast.Assign) else node  # x = x + 1 reads it first
        found |= mentioned(first) - hidden - (set() if isinstance(node, ast.Assign) else made)
        if isinstance(node, ast.AugAssign):
            found |= made - have
        have |= made
    return found


# ---------------------------------------------------------------- what a lab itself has defined


def is_constant(node: ast.AST, known: Iterable[str]) -> bool:
    """Whether an expression has the same value each time: texts, numbers, names of such."""
    if isinstance(node, ast.Lambda):
        return True
    if isinstance(node, ast.Name) and node.id not in known:
        return False
    return isinstance(node, PLAIN) and all(
        is_constant(child, known) for child in ast.iter_child_nodes(node)
    )


def definitions(sources: Sequence[tuple[str, bool]]) -> str:
    """What a lab has defined on a host so far, as one source: its functions, classes, imports.

    ``sources``: each cell's text in order, and whether it is the lab's (else the learner's task:
    a name that it makes is the learner's from there on). Constants are names in capitals.
    """
    kept: list[tuple[ast.stmt, set[str]]] = []
    for text, ours in sources:
        try:
            tree = parse(text)
        except CheckError:
            continue
        if not ours:
            forget(kept, bound(tree))
            continue
        for node in tree.body:
            names = set(targets(node))
            known = {name for _, held in kept for name in held} | BUILTIN
            if isinstance(node, DEFINITION) or is_fixed(node, names, known):
                kept.append((node, names))
            else:
                forget(kept, names)
        forget(kept, added_to(tree))
    body = [only(node, names) for node, names in kept if names]
    return ast.unparse(ast.Module(body=body, type_ignores=[]))


def is_fixed(node: ast.stmt, names: set[str], known: Iterable[str]) -> bool:
    """Whether a statement gives constants their values."""
    if not isinstance(node, ast.Assign) or not all(name.isupper() for name in names):
        return False
    return bool(names) and is_constant(node.value, known)


def added_to(tree: ast.Module) -> set[str]:
    """The names of what is added to or changed inside later (``TABLE["x"] = 1``)."""
    return {
        node.value.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
    }


def forget(kept: list[tuple[ast.stmt, set[str]]], names: set[str]) -> None:
    """These names are no longer the lab's definitions."""
    for node, held in kept:
        if held & names and isinstance(node, ast.Assign):
            held.clear()
        held -= names


def only(node: ast.stmt, names: set[str]) -> ast.stmt:
    """An import without what is no longer the lab's; everything else as it is."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        node.names = [a for a in node.names if (a.asname or a.name.split(".")[0]) in names]
    return node


# ---------------------------------------------------------------- how it runs


class Divert(ast.NodeTransformer):
    """Sends each call and each attribute that is read through the judge."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """``f(x)`` becomes ``CALL(f, x)``."""
        if isinstance(node.func, ast.Name) and node.func.id in OWN_STACK:
            self.generic_visit(node)
            return node
        self.generic_visit(node)
        judge = ast.copy_location(ast.Name(CALL, ast.Load()), node)
        return ast.copy_location(ast.Call(judge, [node.func, *node.args], node.keywords), node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """``a.b`` becomes ``ATTRIBUTE(a, "b")``."""
        self.generic_visit(node)
        if not isinstance(node.ctx, ast.Load):
            return node
        judge = ast.copy_location(ast.Name(ATTRIBUTE, ast.Load()), node)
        name = ast.copy_location(ast.Constant(node.attr), node)
        return ast.copy_location(ast.Call(judge, [node.value, name], []), node)


def compiled(nodes: list[ast.stmt]) -> CodeType:
    """Code of statements, with every call diverted, and with asserts whatever the options are."""
    tree = Divert().visit(ast.Module(body=nodes, type_ignores=[]))
    code: CodeType = compile(
        ast.fix_missing_locations(tree), FILE, "exec", dont_inherit=True, optimize=0
    )
    return code


def compile_check(source: str) -> list[CodeType]:
    """A check's statements, each for itself: between two the judge looks to the rights."""
    return [compiled([node]) for node in parse(source).body]


def compile_definition(source: str) -> CodeType:
    """One of the lab's own definitions."""
    return compiled(parse(source).body)
