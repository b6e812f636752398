"""The process that a check runs in: hooks, signals, threads, limits, as they were at the start."""

from __future__ import annotations

import ctypes
import decimal
import locale
import random
import signal
import socket
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from .pristine import Copies

__all__ = ["Habits", "alone", "drop_hooks", "drop_shell_hooks", "habits", "hide", "settle"]

PATIENCE_S = 0.5  # for threads that are about to end
MONITORS = range(6)  # the tools of sys.monitoring
TRANSFORMERS = ("ast_transformers", "input_transformers_cleanup", "input_transformers_post")
PR_GET_DUMPABLE, PR_SET_DUMPABLE = 3, 4
prctl = ctypes.CDLL(None).prctl


class Habits(NamedTuple):
    """What the process did by itself before any learner's code ran."""

    signals: tuple[tuple[int, Any], ...]
    threads: frozenset[int]
    recursion: int
    switch_s: float
    filters: tuple[Any, ...]
    locale: str


def handlers() -> tuple[tuple[int, Any], ...]:
    """Each signal's handler."""
    return tuple((number, signal.getsignal(number)) for number in sorted(signal.valid_signals()))


def habits() -> Habits:
    """Note them."""
    return Habits(
        handlers(),
        frozenset(sys._current_frames()),
        sys.getrecursionlimit(),
        sys.getswitchinterval(),
        tuple(warnings.filters),
        locale.setlocale(locale.LC_ALL),
    )


def settle(old: Habits) -> None:
    """Drop every hook, and go back to the habits. Called after the modules are as they were."""
    drop_hooks()
    for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
        signal.setitimer(timer, 0)  # first: a signal without its handler ends the process
    for number, handler in old.signals:
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, signal.SIG_IGN)  # drops one that is on its way
            signal.signal(number, handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.setrecursionlimit(old.recursion)
    sys.setswitchinterval(old.switch_s)
    if tuple(warnings.filters) != old.filters:
        warnings.filters[:] = old.filters  # type: ignore[index] # a list, whatever the stub says
    if locale.setlocale(locale.LC_ALL) != old.locale:
        locale.setlocale(locale.LC_ALL, old.locale)
    decimal.setcontext(decimal.Context())
    socket.setdefaulttimeout(None)
    random.seed()


def drop_hooks() -> bool:
    """Tracing, profiling, monitoring: nobody looks over a check's shoulder. True if one did."""
    found = sys.gettrace() is not None or sys.getprofile() is not None
    sys.settrace(None)
    sys.setprofile(None)
    threading.settrace(None)
    threading.setprofile(None)
    monitoring: Any = getattr(sys, "monitoring", None)
    for tool in MONITORS if monitoring else ():
        if monitoring.get_tool(tool) is not None:
            monitoring.set_events(tool, 0)
            monitoring.free_tool_id(tool)
            found = True
    return found


def drop_shell_hooks(shell: Any, space: dict[str, Any]) -> None:
    """Drop what a cell has put in IPython's way, where it would change the cells after it.

    ``space``: the learner's names. What libraries have registered stays.
    """
    for held in (
        *(getattr(shell, name) for name in TRANSFORMERS),
        *shell.events.callbacks.values(),
    ):
        if any(made_in(space, hook) for hook in held):
            held[:] = [hook for hook in held if not made_in(space, hook)]


def made_in(space: dict[str, Any], hook: Any) -> bool:
    """Whether a function, or an object's class, was written in a cell."""
    inside = getattr(getattr(hook, "__func__", hook), "__globals__", None)
    return inside is space or type(hook).__module__ == space["__name__"]


def hide(how: int = 0) -> int:
    """No process of this user may read this one's memory through /proc. How it was before."""
    before: int = prctl(PR_GET_DUMPABLE, 0, 0, 0, 0)
    prctl(PR_SET_DUMPABLE, how, 0, 0, 0)
    return before


def alone(old: Habits, copies: Copies, frames: Callable[[], dict[int, Any]]) -> str:
    """The name of a thread that the submission started and that still runs; empty for none."""
    end = time.monotonic() + PATIENCE_S
    while True:
        found = strangers(old, copies, frames())
        if not found or time.monotonic() > end:
            return found
        time.sleep(0.01)


def strangers(old: Habits, copies: Copies, frames: dict[int, Any]) -> str:
    """The first thread that is neither one of the start nor a library's."""
    for ident, top in frames.items():
        if ident in old.threads or ident == threading.get_ident():
            continue
        if not of_library(ident, top, copies):
            thread = threading._active.get(ident)  # type: ignore[attr-defined] # no lock, no dummy
            name = getattr(thread, "name", None)
            return name if type(name) is str else f"number {ident}"
    return ""


def of_library(ident: int, frame: types.FrameType | None, copies: Copies) -> bool:
    """Whether a thread runs nothing but code that was there before the submission."""
    thread = threading._active.get(ident)  # type: ignore[attr-defined] # as above
    if id(type(thread)) not in copies.ids:
        return False
    target = getattr(thread, "_target", None)
    function = getattr(target, "__func__", target)
    code = getattr(function, "__code__", None)
    if code is not None and id(code) not in copies.codes:
        return False
    while frame is not None:
        if id(frame.f_code) not in copies.codes:
            return False
        frame = frame.f_back
    return True
