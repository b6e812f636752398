"""What was there before any learner's code ran: copies of modules, classes and functions.

``take`` notes it, in tuples, which nobody can change: a module's names and values, a class's, a
function's code. The notes hold references only, so they cost little; ``recovery`` puts back what is
no longer so.
"""

from __future__ import annotations

import gc
import os
import sys
import types
from collections.abc import Iterator
from operator import attrgetter, is_
from typing import Any, NamedTuple

__all__ = [
    "FUNCTION_PARTS",
    "Copies",
    "Group",
    "Room",
    "Shot",
    "bases_of",
    "contents",
    "heap",
    "inside",
    "same_room",
    "take",
]

type_vars = type.__dict__["__dict__"].__get__
bases_of = type.__dict__["__bases__"].__get__
GROUP = 12  # modules that are looked at together
NOT_TAKEN = {"__main__", "builtins", "sys"}  # the learner's; the others are noted apart
OWN_CONTENTS = ("rdmalab", "pyverbs")  # whose constants are noted with what is in them
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


class Group(NamedTuple):
    """Some modules and their classes, laid out so that one look tells whether all is as it was."""

    shots: tuple[Shot, ...]
    modules: tuple[tuple[str, Any], ...]
    tables: tuple[tuple[Any, tuple[Any, ...]], ...]
    held: tuple[Any, ...]  # the dicts of modules, the views of classes'
    sizes: tuple[int, ...]
    names: tuple[str, ...]
    values: tuple[Any, ...]
    kinds: tuple[type, ...]
    bases: tuple[tuple[type, ...], ...]


class Copies(NamedTuple):
    """All that was noted. ``kinds``: the classes that there were; what follows, by id.

    ``functions`` and ``codes`` include those that decorators and functions hold inside.
    """

    shots: tuple[Shot, ...]
    own: tuple[Shot, ...]  # of the judge's own modules, builtins and sys
    groups: tuple[Group, ...]
    kinds: tuple[type, ...]
    ids: frozenset[int]
    functions: frozenset[int]
    codes: frozenset[int]
    environment: tuple[tuple[str, str], ...]
    lists: tuple[tuple[list[Any], tuple[Any, ...]], ...]


# ---------------------------------------------------------------- taking


def room_of(owner: Any) -> Room:
    """The names and values of a module or class now."""
    held = contents(owner)
    bases = bases_of(owner) if isinstance(owner, type) else ()
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


def shot_of(name: str, module: types.ModuleType, noted: set[int]) -> Shot:
    """Note a module, and the classes and functions in it that are not ``noted`` yet, by id."""
    room = room_of(module)
    kinds = [value for value in room.values if isinstance(value, type) and heap(value)]
    classes = tuple(room_of(kind) for kind in only_new(kinds, noted))
    found = [f for part in (room, *classes) for f in functions_in(part.values)]
    functions = tuple(only_new(found, noted))
    parts = tuple(tuple(map(part, functions)) for part in (CODE, DEFAULTS, NAMED))
    own = name.split(".")[0] in OWN_CONTENTS
    tables = tuple(tables_of(room, classes)) if own else ()
    return Shot(name, room, classes, functions, parts, tables)


def only_new(things: list[Any], noted: set[int]) -> Iterator[Any]:
    """Those that are not noted yet; from now on they are."""
    for thing in things:
        if id(thing) not in noted:
            noted.add(id(thing))
            yield thing


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
    if room.bases and bases_of(room.owner) is not room.bases:
        return False
    return all(map(is_, held, room.names)) and all(map(is_, held.values(), room.values))


def take(own: tuple[types.ModuleType, ...], earlier: Copies | None = None) -> Copies:
    """Note everything. With ``earlier`` notes, only modules that are new or have changed since.

    ``own``: modules to be noted apart, whether ``sys.modules`` has them or not.
    """
    known = {shot.name: shot for shot in earlier.shots} if earlier else {}
    noted = set().union(*(map(id, shot.functions) for shot in known.values()))
    noted |= {id(room.owner) for shot in known.values() for room in shot.classes}
    shots, new = [], []
    for name, module in list(sys.modules.items()):
        if type(module) is not types.ModuleType or name in NOT_TAKEN:
            continue
        old = known.get(name)
        if old is None or old.room.owner is not module:
            shots.append(shot_of(name, module, noted))
            new.append(shots[-1])
        else:
            shots.append(renewed(old))
    known_functions: dict[int, types.FunctionType] = {}
    for shot in new:
        for function in shot.functions:
            wrapped_in(function, known_functions)
    codes = nested(tuple(function.__code__ for function in known_functions.values()))
    lists = (sys.path, sys.meta_path, sys.path_hooks, gc.callbacks)
    kinds = all_kinds()
    return Copies(
        tuple(shots),
        tuple(shot_of(module.__name__, module, set()) for module in own),
        tuple(groups_of(shots, earlier.groups if earlier else ())),
        kinds,
        frozenset(map(id, kinds)),
        frozenset(known_functions) | (earlier.functions if earlier else set()),
        frozenset(map(id, codes)) | (earlier.codes if earlier else set()),
        tuple(os.environ.items()),
        tuple((held, tuple(held)) for held in lists),
    )


def renewed(shot: Shot) -> Shot:
    """A shot of an earlier time with what has changed in its module and classes since."""
    rooms = (shot.room, *shot.classes)
    if all(map(same_room, rooms)):
        return shot
    now = [room if same_room(room) else room_of(room.owner) for room in rooms]
    return shot._replace(room=now[0], classes=tuple(now[1:]))


def groups_of(shots: list[Shot], earlier: tuple[Group, ...]) -> Iterator[Group]:
    """All modules in groups; earlier groups whose modules are as they were are taken over."""
    known = {id(group.shots[0]): group for group in earlier}
    for at in range(0, len(shots), GROUP):
        some = shots[at : at + GROUP]
        old = known.get(id(some[0]))
        fits = old is not None and len(old.shots) == len(some) and all(map(is_, old.shots, some))
        yield old if old is not None and fits else group_of(some)


def group_of(shots: list[Shot]) -> Group:
    """Lay some modules out side by side."""
    rooms = [room for shot in shots for room in (shot.room, *shot.classes)]
    kinds = tuple(room.owner for shot in shots for room in shot.classes)
    return Group(
        tuple(shots),
        tuple((shot.name, shot.room.owner) for shot in shots),
        tuple(table for shot in shots for table in shot.tables),
        tuple(contents(room.owner) for room in rooms),
        tuple(len(room.names) for room in rooms),
        tuple(name for room in rooms for name in room.names),
        tuple(value for room in rooms for value in room.values),
        kinds,
        tuple(map(bases_of, kinds)),
    )


def wrapped_in(function: Any, found: dict[int, types.FunctionType]) -> None:
    """Collect a function and those that it holds on to, as a decorator's holds the decorated."""
    if type(function) is not types.FunctionType or id(function) in found:
        return
    found[id(function)] = function
    for cell in function.__closure__ or ():
        try:
            wrapped_in(cell.cell_contents, found)
        except ValueError:
            continue  # an empty cell


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
