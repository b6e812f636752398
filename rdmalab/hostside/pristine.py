"""What was there before any learner's code ran: copies of modules, classes and functions.

``take`` notes it, in tuples, which nobody can change; ``restore`` puts back what is no longer so.
The notes hold references only: a module's names and values, a class's, a function's code. Nothing
is copied that could differ by value, and comparing goes by identity, so that no object of a
submission is ever asked whether it equals another.
"""

from __future__ import annotations

import gc
import os
import sys
import types
from collections.abc import Iterator
from operator import attrgetter, is_
from typing import Any, NamedTuple

__all__ = ["Copies", "restore", "restore_some", "take"]

type_vars = type.__dict__["__dict__"].__get__
NOT_TAKEN = {"__main__"}
OWN_CONTENTS = ("rdmalab", "pyverbs")  # whose constants are noted with what is in them
LEFT = {"__warningregistry__", "__annotations__", "__annotate__", "__annotations_cache__"}
CODE, DEFAULTS, NAMED = map(attrgetter, ("__code__", "__defaults__", "__kwdefaults__"))
FUNCTION_PARTS = ("__code__", "__defaults__", "__kwdefaults__")


class Room(NamedTuple):
    """The names and values of a module or a class."""

    owner: Any
    names: tuple[str, ...]
    values: tuple[Any, ...]
    bases: tuple[type, ...] = ()


class Shot(NamedTuple):
    """A module with its classes, functions and tables."""

    name: str
    room: Room
    classes: tuple[Room, ...]
    functions: tuple[types.FunctionType, ...]
    parts: tuple[tuple[Any, ...], ...]  # of these functions: codes, defaults, defaults by name
    tables: tuple[tuple[Any, tuple[Any, ...]], ...]  # a list, set or dict, and what it holds


class Copies(NamedTuple):
    """All that was noted. ``kinds``: the classes that there were, ``ids`` and ``codes`` by id."""

    shots: tuple[Shot, ...]
    kinds: tuple[type, ...]
    ids: frozenset[int]
    codes: frozenset[int]
    environment: tuple[tuple[str, str], ...]
    lists: tuple[tuple[list[Any], tuple[Any, ...]], ...]


# ---------------------------------------------------------------- taking


def room_of(owner: Any) -> Room:
    """The names and values of a module or class now."""
    held = contents(owner)
    bases = type.__dict__["__bases__"].__get__(owner) if isinstance(owner, type) else ()
    return Room(owner, tuple(held), tuple(held.values()), bases)


def contents(owner: Any) -> Any:
    """The dict of a module, or the view of a class's, whatever its metaclass says."""
    return type_vars(owner) if isinstance(owner, type) else owner.__dict__


def functions_in(values: tuple[Any, ...]) -> Iterator[types.FunctionType]:
    """The plain functions among values, also inside of class methods and properties."""
    for value in values:
        kind = type(value)
        if kind is types.FunctionType:
            yield value
        elif kind in (classmethod, staticmethod) and type(value.__func__) is types.FunctionType:
            yield value.__func__
        elif kind is property:
            for inner in (value.fget, value.fset):
                if type(inner) is types.FunctionType:
                    yield inner


def heap(kind: type) -> bool:
    """Whether a class was made by Python code, and so can be changed by it."""
    return bool(type.__dict__["__flags__"].__get__(kind) & (1 << 9))


def shot_of(name: str, module: types.ModuleType) -> Shot:
    """Note a module, the classes that it holds and their functions."""
    room = room_of(module)
    kinds = {id(value): value for value in room.values if isinstance(value, type) and heap(value)}
    classes = tuple(room_of(kind) for kind in kinds.values())
    found = {id(f): f for part in (room, *classes) for f in functions_in(part.values)}
    functions = tuple(found.values())
    parts = tuple(tuple(map(part, functions)) for part in (CODE, DEFAULTS, NAMED))
    own = name.split(".")[0] in OWN_CONTENTS
    tables = tuple(tables_of(room, classes)) if own else ()
    return Shot(name, room, classes, functions, parts, tables)


def tables_of(room: Room, classes: tuple[Room, ...]) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """The constant tables of a module, and the members of its enumerations."""
    for name, value in zip(room.names, room.values, strict=True):
        if name.isupper() and type(value) in (dict, list, set) and value:  # empty: a register
            yield value, inside(value)
    for kind in classes:
        for name, value in zip(kind.names, kind.values, strict=True):
            if name in ("_member_map_", "_value2member_map_") and type(value) is dict:
                yield value, inside(value)


def inside(table: Any) -> tuple[Any, ...]:
    """What a dict (keys, then values), list or set holds."""
    return (*table, *table.values()) if type(table) is dict else tuple(table)


def same_room(room: Room) -> bool:
    """Whether the names of a module or class still stand for the same objects."""
    held = contents(room.owner)
    if len(held) != len(room.names):
        return False
    if room.bases and type.__dict__["__bases__"].__get__(room.owner) is not room.bases:
        return False
    return all(map(is_, held, room.names)) and all(map(is_, held.values(), room.values))


def same(shot: Shot) -> bool:
    """Whether all of a module is as it was."""
    return (
        same_room(shot.room)
        and all(map(same_room, shot.classes))
        and all(
            all(map(is_, map(part, shot.functions), old))
            for part, old in zip((CODE, DEFAULTS, NAMED), shot.parts, strict=True)
        )
        and all(
            len(held := inside(table)) == len(old) and all(map(is_, held, old))
            for table, old in shot.tables
        )
    )


def take(earlier: Copies | None = None) -> Copies:
    """Note everything. What is as ``earlier`` notes have it is shared with these."""
    known = {shot.name: shot for shot in earlier.shots} if earlier else {}
    shots = []
    for name, module in list(sys.modules.items()):
        if type(module) is not types.ModuleType or name in NOT_TAKEN:
            continue
        old = known.get(name)
        fine = old is not None and old.room.owner is module and same(old)
        shots.append(old if old is not None and fine else shot_of(name, module))
    lists = (sys.path, sys.meta_path, sys.path_hooks, gc.callbacks)
    kinds = all_kinds()
    return Copies(
        tuple(shots),
        kinds,
        frozenset(map(id, kinds)),
        frozenset(id(code) for shot in shots for code in nested(shot.parts[0])),
        tuple(os.environ.items()),
        tuple((held, tuple(held)) for held in lists),
    )


def nested(codes: tuple[Any, ...]) -> Iterator[types.CodeType]:
    """Codes of functions, and of the functions and generators inside of these."""
    for code in codes:
        yield code
        yield from nested(tuple(x for x in code.co_consts if type(x) is types.CodeType))


def all_kinds() -> tuple[type, ...]:
    """Every class that there is."""
    below = type.__dict__["__subclasses__"]
    found: dict[int, type] = {id(object): object}
    waiting: list[type] = [object]
    while waiting:
        for kind in below(waiting.pop()):
            if id(kind) not in found:
                found[id(kind)] = kind
                waiting.append(kind)
    return tuple(found.values())


# ---------------------------------------------------------------- putting back


def restore(copies: Copies) -> None:
    """Make everything as it was noted, and forget modules that are none."""
    for held, old in copies.lists:
        if len(held) != len(old) or not all(map(is_, held, old)):
            held[:] = old
    put_modules(copies.shots)
    put_environment(copies.environment)


def restore_some(copies: Copies, roots: frozenset[str]) -> None:
    """As :func:`restore`, for the modules of some packages only: between two statements."""
    some = tuple(shot for shot in copies.shots if shot.name.split(".")[0] in roots)
    put_modules(some)


def put_modules(shots: tuple[Shot, ...]) -> None:
    """Put modules back under their names, and their contents into them."""
    for shot in shots:
        if sys.modules.get(shot.name) is not shot.room.owner:
            sys.modules[shot.name] = shot.room.owner
        if not same(shot):
            repair(shot)


def repair(shot: Shot) -> None:
    """Put a module's contents back."""
    for room in (shot.room, *shot.classes):
        if not same_room(room):
            put_room(room)
    for part, values in zip(FUNCTION_PARTS, shot.parts, strict=True):
        for function, value in zip(shot.functions, values, strict=True):
            if getattr(function, part) is not value:
                setattr(function, part, value)
    for table, old in shot.tables:
        held = inside(table)
        if len(held) != len(old) or not all(map(is_, held, old)):
            put_table(table, old)


def put_table(table: Any, old: tuple[Any, ...]) -> None:
    """Put the contents of a dict, list or set back."""
    table.clear()
    if type(table) is dict:
        half = len(old) // 2
        table.update(zip(old[:half], old[half:], strict=True))
    elif type(table) is list:
        table.extend(old)
    else:
        table.update(old)


def put_room(room: Room) -> None:
    """Put the names of a module or class back, and remove what has been added."""
    is_kind = isinstance(room.owner, type)
    now = dict(contents(room.owner))
    put = type.__setattr__ if is_kind else types.ModuleType.__setattr__
    remove = type.__delattr__ if is_kind else types.ModuleType.__delattr__
    if is_kind and type.__dict__["__bases__"].__get__(room.owner) is not room.bases:
        type.__dict__["__bases__"].__set__(room.owner, room.bases)
    for name, value in zip(room.names, room.values, strict=True):
        if name in LEFT or name in ("__dict__", "__weakref__"):
            continue
        if name not in now or (now[name] is not value and not came_late(value, now[name])):
            put(room.owner, name, value)
    for name in set(now) - set(room.names) - LEFT:
        if not is_submodule(room.owner, name, now[name]):
            remove(room.owner, name)


def came_late(old: Any, new: Any) -> bool:
    """Whether a place that was left empty has been filled with a value, as modules do on demand."""
    return old is None and not callable(new) and type(new).__module__ != "__main__"


def is_submodule(owner: Any, name: str, value: Any) -> bool:
    """Whether this is a module of a package, imported since."""
    if type(value) is not types.ModuleType or isinstance(owner, type):
        return False
    return sys.modules.get(f"{owner.__name__}.{name}") is value


def put_environment(old: tuple[tuple[str, str], ...]) -> None:
    """The environment as it was: another PATH would find another ``rdma``."""
    if tuple(os.environ.items()) != old:
        os.environ.clear()
        os.environ.update(old)
