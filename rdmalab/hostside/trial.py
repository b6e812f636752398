"""One check being run: its names, its statements, and what it calls of the submission's.

A check has a name space of its own. What it reads of the learner's is looked at first (see
``honesty``) and put in beside the lab's own definitions; builtins come from a copy. What is the
submission's own is called on the stack of a thread of its own, so that no function of the learner's
has the check among its callers, where it could read what is expected or change what is compared.
"""

from __future__ import annotations

import _thread
import ctypes
import functools
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from . import checkcode
from .honesty import Dishonest, check_value, is_own
from .paper import Paper
from .pristine import Copies
from .process import Habits, alone, hide, settle
from .recovery import restore, restore_some

__all__ = ["Court", "Trial", "hear"]

AGAIN_S = 0.2
GONE_S = 2.0
MISSING = object()
END = object()
LEARNERS = ("rdmalab", "pyverbs", "json", "os", "subprocess", "time", "re", "math", "statistics")
set_async = ctypes.pythonapi.PyThreadState_SetAsyncExc


class Court(NamedTuple):
    """What every check needs. ``rights`` puts builtins and the judge's own modules right."""

    copies: Copies
    habits: Habits
    space: dict[str, Any]  # the learner's
    store: dict[str, Any]  # what earlier checks have made for later ones
    codes: dict[str, Any]  # of the lab's definitions, by their text
    touched: list[Any]  # functions whose code was exchanged
    frames: Callable[[], dict[int, Any]]
    rights: Callable[[], None]
    builtins: dict[str, Any]


def hear(court: Court, request: dict[str, Any], paper: Paper) -> None:
    """Run a check to its end. Raises what the check raises; :class:`Dishonest` where it cannot."""
    restore(court.copies, bool(court.touched))
    court.touched.clear()
    settle(court.habits)
    stranger = alone(court.habits, court.copies, court.frames)
    if stranger:
        raise Dishonest(
            f"A thread that the notebook has started still runs ({stranger[:40]}); a check needs"
            " the host for itself. End it, and join() it."
        )
    old, seen = (sys.stdout, sys.stderr), hide()
    try:
        Trial(court, request, paper).run()
    finally:
        court.rights()
        hide(seen)
        sys.stdout, sys.stderr = old
    if alone(court.habits, court.copies, court.frames):
        raise Dishonest("A thread that was started during the check still runs.")


class Trial:
    """The run of one check."""

    def __init__(self, court: Court, request: dict[str, Any], paper: Paper) -> None:
        self.court, self.request, self.paper = court, request, paper
        self.asked = frozenset(request["asked"])
        self.copies = court.copies
        self.refused = ""
        self.dirty = False
        self.statements = checkcode.compile_check(request["source"])
        self.definitions = [self.compiled(text) for text in request["given"]]
        self.made, self.given = set(request["made"]), set(request["defined"])
        self.roots = frozenset({*LEARNERS, *request["packages"]})
        self.linked = set(request["reads"]) - set(court.builtins)
        self.seen: dict[str, Any] = {}
        self.ns: dict[str, Any] = {"__name__": "__main__"}

    def run(self) -> None:
        """The lab's definitions, the learner's values, then one statement after the other."""
        self.look()
        for code in self.definitions:
            exec(code, self.ns)
        kinds = [self.ns.get(name) for name in self.given]
        ids = {id(kind) for kind in kinds if isinstance(kind, type)}
        self.copies = self.copies._replace(ids=self.copies.ids | ids)
        for name in self.request["carry"]:
            if name in self.court.store and name not in self.given:
                self.ns[name] = self.court.store[name]
        self.linked -= set(self.request["carry"])
        self.pull()
        try:
            for code in self.statements:
                if self.dirty:
                    restore_some(self.court.copies, self.roots, bool(self.court.touched))
                    self.dirty = False
                self.look()
                exec(code, self.ns)
        finally:
            self.push()
            made = {name: self.ns[name] for name in self.request["later"] if name in self.ns}
            self.court.store.update(made)
        if self.refused:
            raise Dishonest(self.refused)

    def compiled(self, text: str) -> Any:
        """The code of a definition of the lab's, which most of its checks bring along."""
        codes = self.court.codes
        if text not in codes:
            codes[text] = checkcode.compile_definition(text)
        return codes[text]

    def look(self) -> None:
        """Builtins as they were, and the output to the paper."""
        names = dict(self.court.builtins)
        names[checkcode.CALL], names[checkcode.ATTRIBUTE] = self.call, self.attribute
        self.ns["__builtins__"] = names
        sys.stdout = sys.stderr = self.paper

    # --- names that the check shares with the notebook ------------------------------------------

    def pull(self) -> None:
        """Take over what the notebook has under the names that the check reads."""
        for name in self.linked:
            value = self.court.space.get(name, MISSING)
            if value is self.seen.get(name, MISSING):
                continue
            self.seen[name] = value
            if value is MISSING:
                self.ns.pop(name, None)
            else:
                self.examine(name, value)
                self.ns[name] = value

    def push(self) -> None:
        """Give the notebook what the check, as the lab's own cells, has made anew."""
        for name in self.request["keep"]:
            value = self.ns.get(name, MISSING)
            if name not in self.made | self.linked or value is self.seen.get(name, MISSING):
                continue
            self.seen[name] = value
            if value is MISSING:
                self.court.space.pop(name, None)
            else:
                self.court.space[name] = value

    def examine(self, name: str, value: Any) -> None:
        """Refuse a value that is not what it seems; a check that catches the error is refused."""
        try:
            check_value(name, value, self.copies, self.asked)
        except Dishonest as error:
            self.refused = self.refused or str(error)
            raise

    # --- calls and attributes -------------------------------------------------------------------

    def call(self, function: Any, /, *args: Any, **named: Any) -> Any:
        """What each call of the check goes through."""
        if self.is_ours(function):
            return function(*args, **named)
        if not self.is_library(function) or any(map(self.is_learners, (*args, *named.values()))):
            return self.outside(function, args, named)
        safe = [self.proxy(arg) for arg in args]
        return function(*safe, **{name: self.proxy(arg) for name, arg in named.items()})

    def attribute(self, thing: Any, name: str) -> Any:
        """What each attribute that the check reads goes through."""
        if self.is_learners(thing):
            return self.outside(getattr, (thing, name), {}, name)
        return getattr(thing, name)

    def is_ours(self, function: Any) -> bool:
        """Whether the check or the lab's definitions have made a function."""
        inner = function.__func__ if type(function) is types.MethodType else function
        return type(inner) is types.FunctionType and inner.__globals__ is self.ns

    def is_library(self, function: Any) -> bool:
        """Whether a function was there before the submission."""
        kind = type(function)
        if kind is types.FunctionType:
            return id(function) in self.copies.functions
        if kind is types.MethodType:
            return not self.is_learners(function.__self__) and self.is_library(function.__func__)
        if isinstance(function, type):
            return not is_own(function, self.copies)
        return kind in (types.BuiltinFunctionType, types.MethodDescriptorType) or (
            kind in (types.MethodWrapperType, types.WrapperDescriptorType)
        )

    def is_learners(self, thing: Any) -> bool:
        """Whether an object, or a class, is of the submission's making."""
        if isinstance(thing, type):
            return is_own(thing, self.copies)
        return id(type(thing)) not in self.copies.ids and is_own(type(thing), self.copies)

    def proxy(self, value: Any) -> Any:
        """A learner's function that a library is to call: it is called outside, too."""
        if type(value) not in (types.FunctionType, types.MethodType, functools.partial):
            return value
        if self.is_ours(value) or self.is_library(value):
            return value

        def called(*args: Any, **named: Any) -> Any:
            return self.outside(value, args, named)

        return called

    def outside(
        self, function: Any, args: tuple[Any, ...], named: dict[str, Any], name: str = ""
    ) -> Any:
        """Call what is the submission's on a stack of its own, and look at what comes back."""
        self.push()
        box: list[Any] = []
        done = _thread.allocate_lock()
        done.acquire()
        ident = _thread.start_new_thread(apart, (function, args, named, box, done))
        try:
            done.acquire()
        except KeyboardInterrupt:
            stop(ident, done)
            raise
        finally:
            self.court.rights()
            self.look()
            self.dirty = True
        self.wait_gone(ident)
        self.pull()
        if not box[0]:
            raise plain(box[1], self.copies)
        said = name or getattr(function, "__name__", "")
        self.examine(said if type(said) is str and said else "a function", box[1])
        return self.pulled(box[1]) if is_lazy(box[1]) else box[1]

    def wait_gone(self, ident: int) -> None:
        """Wait for the end of a thread that has said that it is done."""
        end = time.monotonic() + GONE_S
        while ident in self.court.frames():
            if time.monotonic() > end:
                self.refused = self.refused or "A function of the notebook ran on after its end."
                raise Dishonest(self.refused)
            time.sleep(0)

    def pulled(self, items: Any) -> Iterator[Any]:
        """A learner's generator; each item is made outside."""
        while (item := self.outside(next, (items, END), {})) is not END:
            yield item


def apart(function: Any, args: Any, named: Any, box: list[Any], done: Any) -> None:
    """The bottom of the stack of what is the submission's."""
    try:
        box += [True, function(*args, **named)]
    except BaseException as error:
        box += [False, error]
    finally:
        done.release()


def stop(ident: int, done: Any) -> None:
    """Interrupt a thread until it has ended; one that never obeys ends with its kernel."""
    while True:
        set_async(ctypes.c_ulong(ident), ctypes.py_object(KeyboardInterrupt))
        if done.acquire(timeout=AGAIN_S):
            return


def is_lazy(value: Any) -> bool:
    """Whether a value makes its items when they are asked for, by calling what is inside."""
    return hasattr(type(value), "__next__") and type(value).__module__ in ("builtins", "itertools")


def plain(error: BaseException, copies: Copies) -> BaseException:
    """An error of the submission's without its way, which would lead to the check."""
    base = next(kind for kind in type(error).__mro__ if not is_own(kind, copies))
    try:
        new: BaseException = base.__new__(base, *error.args)
        new.args = error.args
        new.__dict__.update(error.__dict__)
    except Exception:
        return RuntimeError(base.__name__)
    return new
