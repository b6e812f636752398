"""The states of a queue pair, the moves between them, and what each move requires.

Pure data, for both halves: labs, the verbs helper and the picture of the states read it. The names
of attributes are those of the ``IBV_QP_*`` mask bits. Two sources:

- the *specification*: InfiniBand Architecture Specification, volume 1, chapter 10.3 (states of a
  queue pair) and 11.2 (the verbs, Modify Queue Pair among them)
- the *kernel's table*: ``qp_state_table`` in Linux' drivers/infiniband/core/verbs.c, against
  which drivers hold a move. The part from RESET to RTS is also in ``ibv_modify_qp(3)``.

``MOVES`` is the kernel's table for RC. Where it, or Soft-RoCE, is not what the specification says,
``DIFFERENCES`` says so, each once; tests/fabric/test_qpstate.py holds all of it against a device.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    "ATTRIBUTES",
    "AUTOMATIC",
    "DIFFERENCES",
    "MEANING",
    "MOVES",
    "POSTING",
    "REQUIRED",
    "STATES",
    "Attribute",
    "Difference",
    "Move",
    "Posting",
    "allowed",
    "attributes_in_words",
    "missing",
    "unknown",
]

STATES = ("RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR")

MEANING = {
    "RESET": "made, or made anew; knows nothing",
    "INIT": "knows its port and what peers may do; receives may be posted",
    "RTR": "ready to receive: knows its peer, and answers it",
    "RTS": "ready to send: knows how long to wait and how often to retry",
    "SQD": "send queue drained: what was begun is finished, nothing new is begun",
    "SQE": "send queue error: on UC and UD only; receiving goes on",
    "ERR": "stopped: every order comes back flushed",
}


class Attribute(NamedTuple):
    """One attribute of ``ibv_qp_attr``: the field's name, and what it says in words."""

    field: str
    words: str


ATTRIBUTES = {
    "STATE": Attribute("qp_state", "the state to move to"),
    "CUR_STATE": Attribute("cur_qp_state", "the state that the program believes it is in"),
    "EN_SQD_ASYNC_NOTIFY": Attribute("en_sqd_async_notify", "tell me when the queue has drained"),
    "ACCESS_FLAGS": Attribute("qp_access_flags", "what the peer may do to our memory"),
    "PKEY_INDEX": Attribute("pkey_index", "the partition (on RoCE: 0)"),
    "PORT": Attribute("port_num", "our port, counted from 1"),
    "QKEY": Attribute("qkey", "the key that datagrams must carry (UD only)"),
    "AV": Attribute("ah_attr", "the way to the peer: its GID, and our GID's index"),
    "PATH_MTU": Attribute("path_mtu", "the most data bytes in one packet, on both sides"),
    "TIMEOUT": Attribute("timeout", "how long to wait for an acknowledgement: 4.096 us * 2**n"),
    "RETRY_CNT": Attribute("retry_cnt", "how often to send again what was not acknowledged"),
    "RNR_RETRY": Attribute("rnr_retry", "how often to send again when the peer was not ready"),
    "RQ_PSN": Attribute("rq_psn", "the number that the peer's first packet carries"),
    "MAX_QP_RD_ATOMIC": Attribute("max_rd_atomic", "READs and atomics that we keep under way"),
    "ALT_PATH": Attribute("alt_ah_attr", "a second way to the peer (InfiniBand only)"),
    "MIN_RNR_TIMER": Attribute("min_rnr_timer", "how long the peer waits when we are not ready"),
    "SQ_PSN": Attribute("sq_psn", "the number that our first packet carries"),
    "MAX_DEST_RD_ATOMIC": Attribute("max_dest_rd_atomic", "READs and atomics we answer at a time"),
    "PATH_MIG_STATE": Attribute("path_mig_state", "which of the two ways is in use"),
    "CAP": Attribute("cap", "the size of the queues"),
    "DEST_QPN": Attribute("dest_qp_num", "the number of the peer's queue pair"),
}

# By type of queue pair, the attributes that the three moves of a bring-up require: the table of
# ibv_modify_qp(3). Each move requires STATE besides.
REQUIRED: dict[str, dict[str, tuple[str, ...]]] = {
    "RC": {
        "INIT": ("PKEY_INDEX", "PORT", "ACCESS_FLAGS"),
        "RTR": ("AV", "PATH_MTU", "DEST_QPN", "RQ_PSN", "MAX_DEST_RD_ATOMIC", "MIN_RNR_TIMER"),
        "RTS": ("SQ_PSN", "MAX_QP_RD_ATOMIC", "RETRY_CNT", "RNR_RETRY", "TIMEOUT"),
    },
    "UC": {
        "INIT": ("PKEY_INDEX", "PORT", "ACCESS_FLAGS"),
        "RTR": ("AV", "PATH_MTU", "DEST_QPN", "RQ_PSN"),
        "RTS": ("SQ_PSN",),
    },
    "UD": {
        "INIT": ("PKEY_INDEX", "PORT", "QKEY"),
        "RTR": (),
        "RTS": ("SQ_PSN",),
    },
}


class Move(NamedTuple):
    """A move that a program may ask for with ``modify``.

    ``required`` and ``optional`` are names of attributes, without STATE, which every move requires.
    Any other attribute makes the kernel refuse.
    """

    old: str
    new: str
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    note: str = ""


_RC = REQUIRED["RC"]
_RUNNING = ("CUR_STATE", "ACCESS_FLAGS", "ALT_PATH", "PATH_MIG_STATE", "MIN_RNR_TIMER")
_DRAINED = (
    *("PORT", "AV", "TIMEOUT", "RETRY_CNT", "RNR_RETRY", "MAX_QP_RD_ATOMIC"),
    *("MAX_DEST_RD_ATOMIC", "ALT_PATH", "ACCESS_FLAGS", "PKEY_INDEX", "MIN_RNR_TIMER"),
    "PATH_MIG_STATE",
)
_ONLY_UNRELIABLE = "an RC queue pair is never in SQE: its errors lead from RTS to ERR at once"

_MOVES = (
    Move("RESET", "INIT", _RC["INIT"], note="here it learns its port and its peer's rights"),
    Move("INIT", "INIT", optional=_RC["INIT"], note="changes these, before a peer is known"),
    Move(
        *("INIT", "RTR", _RC["RTR"]),
        optional=("ALT_PATH", "ACCESS_FLAGS", "PKEY_INDEX"),
        note="here it learns who its peer is; the kernel looks up the way to it",
    ),
    Move(
        *("RTR", "RTS", _RC["RTS"]),
        optional=_RUNNING,
        note="here it learns how to wait and retry; from now on it may send",
    ),
    Move("RTS", "RTS", optional=_RUNNING, note="changes the few attributes that may change live"),
    Move("RTS", "SQD", optional=("EN_SQD_ASYNC_NOTIFY",), note="finish what was begun, then hold"),
    Move("SQD", "SQD", optional=_DRAINED, note="changes what must not change under way"),
    Move("SQD", "RTS", optional=_RUNNING, note="go on with what was held"),
    Move("SQE", "RTS", note=_ONLY_UNRELIABLE),
    *(Move(state, "RESET", note="forgets everything, orders included") for state in STATES),
    *(
        Move(state, "ERR", note="stops; every order that is posted comes back flushed")
        for state in STATES
        if state != "RESET"
    ),
)

MOVES: dict[tuple[str, str], Move] = {(move.old, move.new): move for move in _MOVES}

# Moves that no program asks for: the device makes them.
AUTOMATIC = {
    ("RTS", "ERR"): "RC: an order failed, or the peer broke the rules",
    ("RTR", "ERR"): "RC: the peer broke the rules",
    ("SQD", "ERR"): "RC: an order that was under way failed",
    ("RTS", "SQE"): "UC and UD: an order failed in the send queue",
}


class Posting(NamedTuple):
    """What becomes of an order that is posted in a state; the specification, chapter 10.3.1.

    ``refused``: the call fails; ``kept``: it waits; ``done``: it is carried out; ``flushed``: it
    comes back at once as a completion with IBV_WC_WR_FLUSH_ERR.
    """

    receive: str
    send: str


POSTING = {
    "RESET": Posting("refused", "refused"),
    "INIT": Posting("kept", "refused"),
    "RTR": Posting("done", "refused"),
    "RTS": Posting("done", "done"),
    "SQD": Posting("done", "kept"),
    "SQE": Posting("done", "flushed"),
    "ERR": Posting("flushed", "flushed"),
}


class Difference(NamedTuple):
    """One point in which the hosts' device does not do what the specification says."""

    subject: str
    specification: str
    here: str
    so: str  # what follows for a program


DIFFERENCES = {
    "reset-to-err": Difference(
        "RESET to ERR",
        "a program may move a queue pair to ERR from every state",
        "EINVAL: the table of the Linux kernel leaves this move out, for all devices",
        "ask for the state first; from RESET there is nothing to flush",
    ),
    "sqd-draining": Difference(
        "leaving SQD",
        "a program may move a queue pair to RESET from every state",
        "EINVAL as long as the send queue drains: until then only ERR is open",
        "wait until ibv_query_qp shows sq_draining as 0",
    ),
    "sqd-holds-on": Difference(
        "SQD to RTS",
        "sends that were held go out when the queue pair is in RTS again",
        "they stay until the next post_send, which starts them all",
        "post once more after the pause",
    ),
    "drained-unasked": Difference(
        "the event SQ_DRAINED",
        "comes when the move to SQD has asked for it, with EN_SQD_ASYNC_NOTIFY",
        "always comes",
        "take it from the events in any case",
    ),
    "comm-est": Difference(
        "the event COMM_EST",
        "tells of the first packet that reaches a queue pair in RTR",
        "never comes",
        "learn of the peer from a completion, or over another channel",
    ),
    "sqe": Difference(
        "a failed send on UC or UD",
        "leads to SQE, where receiving goes on",
        "leads to ERR, as on RC; no queue pair is ever in SQE",
        "handle ERR, and on a card SQE as well",
    ),
    "recv-in-err": Difference(
        "a receive posted in ERR",
        "comes back flushed",
        "is kept, silently, until a send is posted or the queue pair moves to ERR once more",
        "to flush, move to ERR after the last post_recv",
    ),
    "no-state-bit": Difference(
        "modify without STATE",
        "takes the attributes that may change in the state",
        "takes others, too, unchecked: TIMEOUT in RESET, for example",
        "set STATE always, to the state that it is in if no other is wanted",
    ),
    "values": Difference(
        "values out of range",
        "are refused",
        "several are taken: path_mtu 0, a dest_qp_num or PSN of more than 24 bits,"
        " min_rnr_timer above 31, retry_cnt and rnr_retry above 7",
        "check them before the call; a card may refuse what works here",
    ),
}


def allowed(old: str, new: str) -> bool:
    """Whether a program may ask for the move, by the kernel's table."""
    return (old, new) in MOVES


def missing(old: str, new: str, given: set[str]) -> tuple[str, ...]:
    """The attributes that the move requires and that are not in ``given``."""
    return tuple(name for name in MOVES[old, new].required if name not in given)


def unknown(old: str, new: str, given: set[str]) -> tuple[str, ...]:
    """The attributes in ``given`` that the move does not take, by which the kernel refuses."""
    move = MOVES[old, new]
    return tuple(sorted(given - {"STATE", *move.required, *move.optional}))


def attributes_in_words(names: tuple[str, ...]) -> str:
    """One line for each attribute: its mask bit, its field, and what it says."""
    width = max((len(name) for name in names), default=0)
    return "\n".join(
        f"IBV_QP_{name:{width}}  {ATTRIBUTES[name].field}: {ATTRIBUTES[name].words}"
        for name in names
    )
