"""Looks at a learner's queue pair by its variable's name, and moves it: for the state diagram."""

from __future__ import annotations

import contextlib
import errno
import gc
import time
from typing import Any

import pyverbs.enums as e
from IPython.core.getipython import get_ipython
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.pyverbs_error import PyverbsRDMAError
from pyverbs.qp import QP, QPAttr

from .qpstate import STATES

__all__ = ["Gone", "find", "look", "perform"]

TYPES = {e.IBV_QPT_RC: "RC", e.IBV_QPT_UC: "UC", e.IBV_QPT_UD: "UD"}


class Gone(Exception):
    """There is no queue pair by that name; the text says what there is."""


def namespace() -> dict[str, Any]:
    """The learner's variables."""
    shell = get_ipython()
    return dict(shell.user_ns) if shell is not None else {}


def find(name: str) -> QP:
    """The queue pair that is bound to ``name`` (``qp``, or ``ep.qp``). Raises :class:`Gone`."""
    first, *rest = name.split(".")
    variables = namespace()
    if first not in variables:
        raise Gone(f"there is no variable {first!r}; run the cell that makes it")
    found = variables[first]
    for part in rest:
        found = getattr(found, part, None)
    if not isinstance(found, QP):
        kind = type(found).__name__
        raise Gone(f"{name} is no queue pair but {'an' if kind[:1] in 'aeiou' else 'a'} {kind}")
    if not is_open(found):
        raise Gone(f"{name} is closed; run the cell that makes it")
    return found


def is_open(qp: QP) -> bool:
    """Whether the queue pair still exists: any other question to a closed one ends the process.

    pyverbs tells nobody, but drops its completion queues when it closes a queue pair.
    """
    return any(isinstance(part, CQ) for part in gc.get_referents(qp))


def state_of(qp: QP) -> tuple[str, int]:
    """The state and the type that the kernel tells, not what a library remembers."""
    attr, init = qp.query(e.IBV_QP_STATE)
    return STATES[attr.qp_state], init.qp_type


def look(name: str) -> dict[str, Any]:
    """State, number and type of the queue pair, and the row of our own GID at this moment."""
    import rdmalab

    try:
        qp = find(name)
        state, kind = state_of(qp)
    except Gone as gone:
        return {"found": False, "why": str(gone)}
    row = None
    with contextlib.suppress(LookupError):  # eth0 has lost its address: that is the learner's news
        row = rdmalab.here.gid_index
    return {
        "found": True,
        "state": state,
        "number": qp.qp_num,
        "type": TYPES.get(kind, str(kind)),
        "gid": rdmalab.here.gid,
        "gid_index": row,
        "mtu": rdmalab.here.mtu,
    }


def perform(name: str, code: str) -> dict[str, Any]:
    """Run the text of a call that moves the queue pair; what :func:`look` tells, and the answer.

    ``errno`` is the name of the kernel's refusal, ``error`` what Python or pyverbs refused.
    """
    before = look(name)
    if not before["found"]:
        return before
    names = {"e": e, "AHAttr": AHAttr, "GID": GID, "GlobalRoute": GlobalRoute, "QPAttr": QPAttr}
    refusal, trouble = "", ""
    begin = time.monotonic()
    try:
        exec(compile(code, f"<move of {name}>", "exec"), {**namespace(), **names})
    except PyverbsRDMAError as error:
        refusal = errno.errorcode.get(error.error_code, str(error.error_code))
    except Exception as error:
        trouble = f"{type(error).__name__}: {error}"
    took_ms = 1000 * (time.monotonic() - begin)
    return {
        **look(name),
        "old": before["state"],
        "errno": refusal,
        "error": trouble,
        "took_ms": took_ms,
    }
