"""Puts back what is no longer as it was noted (see ``pristine``).

Comparing goes by identity alone and inside C, so that no object of a submission is ever asked
whether it equals another, and a look at everything takes a few milliseconds.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable
from itertools import chain
from operator import is_, methodcaller
from typing import Any

from .pristine import (
    FUNCTION_PARTS,
    Copies,
    Group,
    Room,
    Shot,
    bases_of,
    contents,
    inside,
    same_room,
)

__all__ = ["make_upkeep", "put_groups", "restore", "restore_some", "top_of"]

LEFT = {"__warningregistry__", "__annotations__", "__annotate__", "__annotations_cache__"}
FIXED = {"__dict__", "__weakref__"}
values_of = methodcaller("values")


def same(group: Group) -> bool:
    """Whether all modules and classes of a group are as they were, functions' code apart."""
    return (
        tuple(map(len, group.held)) == group.sizes
        and all(map(is_, chain.from_iterable(group.held), group.names))
        and all(map(is_, chain.from_iterable(map(values_of, group.held)), group.values))
        and all(map(is_, map(bases_of, group.kinds), group.bases))
    )


def restore(copies: Copies, functions: bool) -> None:
    """Make everything as it was noted; ``functions``: also the code of all functions."""
    for shot in copies.shots if functions else ():
        put_functions(shot)
    for held, old in copies.lists:
        if len(held) != len(old) or not all(map(is_, held, old)):
            held[:] = old
    put_groups(copies.groups)
    put_environment(copies.environment)


def restore_some(copies: Copies, roots: frozenset[str], functions: bool) -> None:
    """As :func:`restore`, for some packages' modules only: between two statements."""
    groups = tuple(g for g in copies.groups if any(top_of(shot) in roots for shot in g.shots))
    for group in groups if functions else ():
        for shot in group.shots:
            put_functions(shot)
    put_groups(groups)


def top_of(shot: Shot) -> str:
    """The package that a module belongs to."""
    return shot.name.partition(".")[0]


def put_groups(groups: tuple[Group, ...]) -> None:
    """Put modules back under their names, and their contents into them."""
    for group in groups:
        put_modules(group)
        if not same(group):
            put_rooms(group)


def make_upkeep(groups: tuple[Group, ...]) -> Callable[[], None]:
    """What does as :func:`put_groups`, three times as fast, and for no verdict.

    It asks values whether they equal: one that lies leaves its own kernel broken, and no other.
    What rightly came late (see :func:`put_room`) is not looked at again.
    """
    known = [group.values for group in groups]

    def upkeep() -> None:
        for number, group in enumerate(groups):
            put_modules(group)
            try:
                if values_in(group) == known[number]:
                    continue
            except Exception:  # of a value that will not be compared
                pass
            put_rooms(group)
            known[number] = values_in(group)

    return upkeep


def values_in(group: Group) -> tuple[Any, ...]:
    """What its modules and classes hold now."""
    return tuple(chain.from_iterable(map(values_of, group.held)))


def put_modules(group: Group) -> None:
    """Put modules back under their names, and the contents of their tables."""
    for name, module in group.modules:
        if sys.modules.get(name) is not module:
            sys.modules[name] = module
    for table, old in group.tables:
        held = inside(table)
        if len(held) != len(old) or not all(map(is_, held, old)):
            put_table(table, old)


def put_rooms(group: Group) -> None:
    """Put back what is not as it was in modules and classes."""
    for shot in group.shots:
        for room in (shot.room, *shot.classes):
            if not same_room(room):
                put_room(room)


def put_functions(shot: Shot) -> None:
    """Put the code and the defaults of a module's functions back."""
    for part, values in zip(FUNCTION_PARTS, shot.parts, strict=True):
        for function, value in zip(shot.functions, values, strict=True):
            if getattr(function, part) is not value:
                setattr(function, part, value)


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
    if is_kind and bases_of(room.owner) is not room.bases:
        type.__dict__["__bases__"].__set__(room.owner, room.bases)
    for name, value in zip(room.names, room.values, strict=True):
        if name in LEFT or name in FIXED:
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
