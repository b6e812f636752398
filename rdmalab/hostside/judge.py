"""Judges a check in the process where the submission ran, with nothing of the submission's between.

Learner's code can change everything in its own process that is Python: builtins, modules, classes,
the kernel. So a check is run by code that holds on to what was there before::

    request ──▶ usher ──▶ preside ── rights, restore, settle ── the check's statements ──▶ verdict
                (audit hook)   └─ begin ──────────── sealer ─────────────── end ┘
                                                   (audit hook)

*Usher* and *sealer* are audit hooks (PEP 578): the interpreter holds them where no Python code can
reach or remove them, and calls them with tracing switched off. The sealer knows a secret that only
the grader has too, and seals a verdict only if the very frame of ``preside`` that began with this
request ends it; so whoever replaces the kernel's handlers, or forges a reply, cannot say "ok". The
usher refuses what would find the hooks: ``gc.get_objects`` and its like, other threads' frames.

What this cannot stop: code that changes the interpreter's memory (``ctypes``). See
docs/decisions.md.
"""

from __future__ import annotations

import builtins
import gc
import hmac
import json
import sys
from collections.abc import Callable
from typing import Any

from . import checkcode, honesty, paper, pristine, process, recovery, trial
from .checkcode import CheckError
from .honesty import Dishonest
from .paper import Paper
from .pristine import FUNCTION_PARTS, Copies
from .recovery import make_upkeep, top_of

__all__ = ["answer", "convene", "prepare"]

WHY_MOST = 2000  # characters
OURS = (checkcode, honesty, paper, pristine, process, recovery, trial, builtins, sys)
KERNELS = {  # packages without which the kernel cannot take the next message
    *("IPython", "asyncio", "collections", "comm", "concurrent", "contextlib", "datetime"),
    *("dateutil", "functools", "hashlib", "hmac", "inspect", "ipykernel", "json", "logging", "os"),
    *("jupyter_client", "queue", "re", "selectors", "socket", "struct", "threading", "time"),
    *("tornado", "traitlets", "types", "typing", "uuid", "weakref", "zmq"),
}
STREAMS = ("stdout", "stderr")
JUDGE, BEGIN, OVER = "rdmalab.judge", "rdmalab.begin", "rdmalab.end"
HUNTING = frozenset(
    {
        *("gc.get_objects", "gc.get_referrers", "gc.get_referents", "sys.addaudithook"),
        *("sys._current_frames", "sys._current_exceptions"),
    }
)
_earlier: Copies | None = None
_myself = sys.modules[__name__]
NOT_HERE = "this host is graded: other objects, frames and memory are not to be looked through"


def answer(content: dict[str, Any]) -> dict[str, Any]:
    """The reply to a request: its verdict, with a seal if a judge is in office."""
    box: dict[str, Any] = {}
    sys.audit(JUDGE, content["text"], box)
    return box or {"ended": "refused", "why": "this kernel has no judge", "printed": "", "seal": ""}


def convene(
    secret: bytes, copies: Copies, habits: process.Habits, space: dict[str, Any]
) -> Callable[[], None]:
    """Put the judge of this process into office, before any learner's code runs; for good.

    Returns what the kernel calls after each cell, so that it can go on itself.
    """
    busy: list[bool] = []
    touched: list[Any] = []
    rights, plain = make_rights(copies), dict(vars(builtins))
    court = trial.Court(copies, habits, space, {}, {}, touched, make_frames(busy), rights, plain)
    preside = make_preside(court)
    sys.addaudithook(make_sealer(secret, preside.__code__))
    sys.addaudithook(make_usher(preside, busy, touched))
    return make_aftermath(copies, space)


def make_rights(copies: Copies) -> Callable[[], None]:
    """What puts builtins, sys and the judge's own modules right, and needs none of them."""
    shots = copies.own
    pairs = tuple(
        (shot.room.owner.__dict__, name, value)
        for shot in shots
        for name, value in zip(shot.room.names, shot.room.values, strict=True)
        if not (shot.name == "sys" and name in STREAMS)
    )
    codes = tuple(
        (function, *parts)
        for shot in shots
        for function, *parts in zip(shot.functions, *shot.parts, strict=True)
    )
    get = dict.get

    def rights() -> None:
        for held, name, value in pairs:
            if get(held, name) is not value:
                held[name] = value
        for function, code, defaults, named in codes:
            if function.__code__ is not code:
                function.__code__ = code
            if function.__defaults__ is not defaults:
                function.__defaults__ = defaults
            if function.__kwdefaults__ is not named:
                function.__kwdefaults__ = named

    return rights


def make_aftermath(copies: Copies, space: dict[str, Any]) -> Callable[[], None]:
    """What puts right, after a cell, all that the kernel itself works with.

    In ``space``, the learner's names, these are what magics, shell lines and the lab's own cells go
    through. Other names may hide builtins: learners call things `sum` and `id` and use them.
    """
    rights, drop = make_rights(copies), process.drop_hooks
    groups = tuple(g for g in copies.groups if any(top_of(s) in KERNELS for s in g.shots))
    upkeep = make_upkeep(groups)
    streams = tuple((name, getattr(sys, name)) for name in STREAMS)
    get_ipython, drop_shells = space["get_ipython"], process.drop_shell_hooks
    shell = getattr(get_ipython, "__self__", None)

    def aftermath() -> None:
        rights()
        if drop():
            rights()  # what a hook has done on the way
        upkeep()
        for name, stream in streams:
            now = getattr(sys, name)
            if now is None or id(type(now)) not in copies.ids:
                setattr(sys, name, stream)
        space["get_ipython"] = get_ipython
        space.pop("print", None)
        if shell is not None:
            drop_shells(shell, space)

    return aftermath


def make_frames(busy: list[bool]) -> Callable[[], dict[int, Any]]:
    """``sys._current_frames``, which the usher lets the judge alone call."""
    current = sys._current_frames

    def frames() -> dict[int, Any]:
        busy.append(True)
        try:
            return current()
        finally:
            busy.clear()

    return frames


def make_preside(court: trial.Court) -> Any:
    """What hears one request. Only its own frame can begin and end a verdict."""
    audit, rights, hear, paper_kind = sys.audit, court.rights, trial.hear, Paper
    stop, start, loads = gc.disable, gc.enable, json.loads

    def preside(text: str, box: dict[str, Any]) -> None:
        stop()  # the collector would call what the learner has left, here
        audit(BEGIN, text)
        rights()
        sheet = paper_kind()
        try:
            hear(court, loads(text), sheet)
        except BaseException as error:
            rights()
            audit(OVER, box, *verdict(error), sheet.text())
            error.__traceback__ = error.__context__ = None
        else:
            audit(OVER, box, "ok", "", sheet.text())
        finally:
            start()

    return preside


def make_sealer(secret: bytes, code: Any) -> Callable[[str, tuple[Any, ...]], None]:
    """The hook that seals verdicts of a running ``preside``, whose code this is."""
    pending: list[Any] = []
    frame_of, digest = sys._getframe, hmac.digest

    def sealer(event: str, args: tuple[Any, ...]) -> None:
        if event == BEGIN:
            pending[:] = [frame_of(1), args[0]]
        elif event == OVER and pending and pending[0] is frame_of(1):
            text, known = pending[1], pending[0].f_code is code
            pending.clear()
            box, ended, why, printed = args
            if known:
                words = "\0".join((text, ended, why, printed)).encode(errors="replace")
                seal = digest(secret, words, "sha256").hex()
                box.update(ended=ended, why=why, printed=printed, seal=seal)

    return sealer


def make_usher(
    preside: Any, busy: list[bool], touched: list[Any]
) -> Callable[[str, tuple[Any, ...]], None]:
    """The hook that lets requests in and hunters out."""

    def usher(event: str, args: tuple[Any, ...]) -> None:
        if event in HUNTING and not busy:
            raise RuntimeError(NOT_HERE)
        if event == "open" and type(args[0]) is str and args[0].endswith("/mem"):
            raise RuntimeError(NOT_HERE)
        if event == "object.__setattr__" and args[1] in FUNCTION_PARTS:
            touched.append(args[0])
        if event == JUDGE:
            preside(*args)

    return usher


def verdict(error: BaseException) -> tuple[str, str]:
    """How a check that did not come to its end is told: ``raised`` or ``refused``, and why."""
    if isinstance(error, (Dishonest, CheckError)):
        return "refused", str(error)[:WHY_MOST]
    if isinstance(error, KeyboardInterrupt):
        return "raised", "the check was interrupted"
    words = error.args[0] if len(error.args) == 1 else error.args
    said = str(words) if type(words) in (str, int, float) else ""
    if isinstance(error, AssertionError):
        return "raised", said[:WHY_MOST]
    return "raised", f"{type(error).__name__}: {said}"[:WHY_MOST]


def prepare() -> tuple[Copies, process.Habits]:
    """Notes of this process as it is now; to be made before any learner's code runs.

    What was noted before (in the nursery, for all hosts) is shared, not noted again.
    """
    global _earlier
    _earlier = pristine.take((*OURS, _myself), _earlier)
    return _earlier, process.habits()
