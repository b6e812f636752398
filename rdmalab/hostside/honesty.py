"""Whether a value is what it seems: of a class that the submission has not made itself.

A check that compares an answer asks the answer: ``answer == 5`` calls its ``__eq__``. So what a
check reads may be numbers, texts, containers, verbs objects, but nothing whose class was written in
the notebook, unless the task asks for that class; and such a class may not say what equals it.
"""

from __future__ import annotations

import functools
import os
import sys
import types
from collections import deque
from typing import Any

from .pristine import Copies, contents, heap

__all__ = ["Dishonest", "check_value", "is_own"]

MOST_OBJECTS = 20000  # that are looked at behind one name
LOOKED_INTO = ("rdmalab", "pyverbs")  # objects of these packages are looked at from inside
OF_DATA = (int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset)
ASKS = {
    *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__bool__"),
    *("__del__", "__getattribute__", "__getattr__", "__class__", "__instancecheck__", "__index__"),
    *("__int__", "__float__", "__format__", "__iter__", "__next__", "__getitem__", "__contains__"),
    *("__enter__", "__exit__", "__set_name__", "__init_subclass__", "__reduce_ex__", "__radd__"),
}
METHODS = (
    types.FunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.GetSetDescriptorType,
    property,
    classmethod,
    staticmethod,
)
mro = type.__dict__["__mro__"].__get__
name_of = type.__dict__["__qualname__"].__get__
module_of = type.__dict__["__module__"].__get__


class Dishonest(Exception):
    """A value that cannot be judged; the text says in a sentence what it is."""


def is_own(kind: type, copies: Copies) -> bool:
    """Whether a class was made by the submission: neither there before it, nor a library's."""
    if id(kind) in copies.ids or not heap(kind):
        return False
    meta = type(kind)
    return not from_library(kind) or (meta is not type and is_own(meta, copies))


def from_library(kind: type) -> bool:
    """Whether a class comes from a library that was imported since, a file of another user's."""
    module = sys.modules.get(str(module_of(kind)))
    spec = getattr(module, "__spec__", None)
    origin = getattr(spec, "origin", None)
    if type(module) is not types.ModuleType or type(origin) is not str:
        return False
    try:
        foreign = os.stat(origin).st_uid != os.getuid()
    except OSError:
        return False
    made = contents(module).get(name_of(kind)) is kind
    codes = [f.__code__ for f in contents(kind).values() if type(f) is types.FunctionType]
    return foreign and made and all(code.co_filename == origin for code in codes)


def check_value(name: str, value: Any, copies: Copies, asked: frozenset[str]) -> None:
    """Raise :class:`Dishonest` if ``value``, or what it holds, is of a class of the submission.

    ``asked``: the classes that a task asks for, by name.
    """
    seen: dict[int, Any] = {}
    waiting = [value]
    while waiting and len(seen) < MOST_OBJECTS:
        thing = waiting.pop()
        if id(thing) in seen:
            continue
        seen[id(thing)] = thing
        waiting += parts(name, thing, copies, asked)


def parts(name: str, thing: Any, copies: Copies, asked: frozenset[str]) -> list[Any]:
    """Look at one object; what it holds is returned."""
    kind = type(thing)
    if isinstance(thing, type) and kind is thing.__class__:
        if is_own(thing, copies):
            check_asked(name, thing, copies, asked)
        return []
    own = is_own(kind, copies)
    if own:
        check_asked(name, kind, copies, asked)
    if kind is types.MethodType:
        return [thing.__self__, thing.__func__]
    if kind is functools.partial:
        return [thing.func, thing.args, thing.keywords]
    if kind is types.ModuleType:
        if sys.modules.get(thing.__name__) is not thing:
            raise Dishonest(f"`{name}` is a module that the notebook has put together itself.")
        return []
    if issubclass(kind, dict):
        return [*dict.keys(thing), *dict.values(thing)]
    for container in (list, tuple, set, frozenset, deque):
        if issubclass(kind, container):
            return list(container.__iter__(thing))
    return inner(name, thing, own, copies)


def inner(name: str, thing: Any, own: bool, copies: Copies) -> list[Any]:
    """The attributes of an object. None of them may stand in the place of a method."""
    kind = type(thing)
    try:
        held = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return []
    if type(held) is not dict or kind is types.FunctionType:
        return []
    for attribute in held:
        for base in mro(kind):
            if type(contents(base).get(attribute)) in METHODS:
                raise Dishonest(
                    f"In `{name}`, the method `{attribute}` of {name_of(kind)} has been replaced;"
                    " a check needs the real one."
                )
    root = str(module_of(kind)).split(".")[0]
    if own or root in LOOKED_INTO:
        return list(held.values())
    for value in held.values():  # such as a context manager's generator: it would run in the check
        code = getattr(value, "__code__", None) or getattr(value, "gi_code", None)
        running = type(value) in (types.FunctionType, types.GeneratorType)
        if running and id(code) not in copies.codes:
            raise Dishonest(f"`{name}` holds a function of the notebook in a {name_of(kind)}.")
    return []


def check_asked(name: str, kind: type, copies: Copies, asked: frozenset[str]) -> None:
    """Raise :class:`Dishonest` for a class of the submission that no task asks for.

    One that is asked for must be a plain class, without methods that Python calls by itself.
    """
    said = name_of(kind)
    data = [name_of(base) for base in mro(kind) if base in OF_DATA]
    if said not in asked or data or type(kind) is not type:
        like = f", a kind of {data[0]}" if data else ""
        raise Dishonest(
            f"`{name}` holds an object of a class that the notebook itself has made ({said}{like})."
            " A check looks at plain values: numbers, texts, lists, verbs objects."
        )
    for base in mro(kind):
        if is_own(base, copies):
            own = sorted(ASKS & set(contents(base)))
            own = [part for part in own if contents(base)[part] is not None]
            if own:
                raise Dishonest(
                    f"The class {said} has a method `{own[0]}`, which the task does not ask for"
                    " and a check cannot trust."
                )
