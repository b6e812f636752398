"""The call that moves a queue pair, as Python text, and a refusal of it in words.

Pure data and text, for both halves: the notebook's state diagram shows the call before it is made,
and the host runs exactly that text. An attribute of the move takes one or more *inputs*, which are
plain text or numbers as a learner would type them: ``1024`` bytes for ``path_mtu``, ``local_write
remote_read`` for ``qp_access_flags``.
"""

from __future__ import annotations

import ipaddress
import textwrap
from collections.abc import Mapping
from typing import Any, NamedTuple

from .qpstate import ATTRIBUTES, DIFFERENCES, MOVES, missing, unknown

__all__ = ["INPUTS", "Input", "call", "explain", "inputs_of"]

ACCESS = ("local_write", "remote_write", "remote_read", "remote_atomic")
ROW = 48  # characters of a row of flags
PATH_MTUS = (256, 512, 1024, 2048, 4096)
# IBTA vol. 1, table 45 (RNR NAK timer field): milliseconds for the codes 0 to 31.
RNR_MS = (
    *(655.36, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.16, 0.24, 0.32, 0.48, 0.64, 0.96, 1.28),
    *(1.92, 2.56, 3.84, 5.12, 7.68, 10.24, 15.36, 20.48, 30.72, 40.96, 61.44, 81.92, 122.88),
    *(163.84, 245.76, 327.68, 491.52),
)


class Input(NamedTuple):
    """One thing to fill in: which attribute it belongs to, what it is, and what stands there."""

    attribute: str
    words: str
    default: str  # "" : only the peer can tell


INPUTS = {
    "port_num": Input("PORT", "our port, counted from 1", "1"),
    "pkey_index": Input("PKEY_INDEX", "the partition (on RoCE: 0)", "0"),
    "qp_access_flags": Input(
        "ACCESS_FLAGS", f"what the peer may do: any of {', '.join(ACCESS)}", " ".join(ACCESS)
    ),
    "qkey": Input("QKEY", "the key that datagrams must carry", "0x11111111"),
    "dgid": Input("AV", "the peer's GID; empty: a way without GID", ""),
    "sgid_index": Input("AV", "the row of our own GID", "1"),
    "path_mtu": Input(
        "PATH_MTU", "most data bytes in a packet: 256, 512, 1024, 2048, 4096", "1024"
    ),
    "dest_qp_num": Input("DEST_QPN", "the number of the peer's queue pair", ""),
    "rq_psn": Input("RQ_PSN", "the number of the peer's first packet", "1000"),
    "max_dest_rd_atomic": Input(
        "MAX_DEST_RD_ATOMIC", "READs and atomics we answer at a time", "16"
    ),
    "min_rnr_timer": Input("MIN_RNR_TIMER", "a code: how long the peer waits for a receive", "12"),
    "sq_psn": Input("SQ_PSN", "the number of our first packet", "1000"),
    "max_rd_atomic": Input("MAX_QP_RD_ATOMIC", "READs and atomics we keep under way", "16"),
    "timeout": Input("TIMEOUT", "a code: how long to wait for an acknowledgement", "14"),
    "retry_cnt": Input("RETRY_CNT", "how often to send again without one", "6"),
    "rnr_retry": Input("RNR_RETRY", "how often to send again when the peer was not ready", "6"),
    "en_sqd_async_notify": Input("EN_SQD_ASYNC_NOTIFY", "1: tell when the queue has drained", "1"),
}


def inputs_of(attribute: str) -> tuple[str, ...]:
    """The inputs that an attribute takes; none for those that this kit does not offer."""
    return tuple(key for key, one in INPUTS.items() if one.attribute == attribute)


def number(key: str, text: Any) -> int:
    """An input as a whole number. ``ValueError`` in words."""
    try:
        return int(str(text), 0)
    except ValueError:
        shown = f"{text!r}" if str(text).strip() else "nothing"
        raise ValueError(f"{key} must be a whole number; there is {shown}.") from None


def code_of(key: str, text: Any) -> tuple[str, str]:
    """An input as Python, and a comment that says what an encoded value means."""
    if key == "qp_access_flags":
        words = str(text).replace(",", " ").split()
        wrong = [word for word in words if word not in ACCESS]
        if wrong:
            raise ValueError(f"There is no right {wrong[0]!r}; there are {', '.join(ACCESS)}.")
        return joined([f"e.IBV_ACCESS_{word.upper()}" for word in words]) if words else "0", ""
    value = number(key, text)
    if key == "path_mtu":
        return (f"e.IBV_MTU_{value}", "") if value in PATH_MTUS else (str(value), "no path MTU")
    if key == "timeout":
        wait = f"4.096 us * 2**{value} = {4.096e-3 * 2**value:.3g} ms" if value else "for ever"
        return str(value), wait if 0 <= value < 32 else "out of range"
    if key == "min_rnr_timer":
        return str(value), f"{RNR_MS[value]:g} ms" if 0 <= value < 32 else "out of range"
    return (hex(value) if key == "qkey" else str(value)), ""


def joined(names: list[str]) -> str:
    """Flags joined by ``|``; more than one in rows that fit where they are shown."""
    if len(names) == 1:
        return names[0]
    rows = textwrap.wrap("\xa0| ".join(names), ROW)  # a bar stays with the flag before it
    return "\n    ".join(["(", *rows]).replace("\xa0", " ") + ")"


def way(values: Mapping[str, Any]) -> list[str]:
    """The address handle's attributes as Python: with a GID (a GRH), or without one."""
    port = number("port_num", values.get("port_num", 1))
    gid = str(values.get("dgid", "")).strip()
    if not gid:
        return [f"attr.ah_attr = AHAttr(port_num={port})"]
    try:
        in_full = ipaddress.IPv6Address(gid).packed.hex(":", 2)
    except ValueError:
        raise ValueError(f"{gid!r} is no GID; one looks like ::ffff:10.0.0.2.") from None
    row = number("sgid_index", values.get("sgid_index", ""))
    return [
        f'peer = GID("{in_full}")',
        f"route = GlobalRoute(dgid=peer, sgid_index={row})",
        f"attr.ah_attr = AHAttr(\n    gr=route, is_global=1, port_num={port})",
    ]


def call(name: str, new: str, given: tuple[str, ...], values: Mapping[str, Any]) -> str:
    """The Python that moves the queue pair ``name`` to the state ``new`` with these attributes.

    ``given``: names of attributes; ``values``: their inputs. ``ValueError`` says which input cannot
    be read.
    """
    lines = [f"attr = QPAttr(qp_state=e.IBV_QPS_{new})"]
    for attribute in given:
        if attribute == "AV":
            lines += way(values)
            continue
        for key in inputs_of(attribute):
            text, comment = code_of(key, values.get(key, ""))
            lines.append(f"attr.{key} = {text}" + (f"  # {comment}" if comment else ""))
    mask = joined([f"e.IBV_QP_{attribute}" for attribute in ("STATE", *given)])
    return "\n".join([*lines, f"mask = {mask}", f"{name}.modify(attr, mask)"])


def explain(
    old: str, new: str, given: tuple[str, ...], values: Mapping[str, Any], errno: str
) -> str:
    """Why the kernel refused, in words, as far as the states and attributes tell."""
    if (old, new) not in MOVES:
        return no_such_move(old, new)
    lacking, surplus = missing(old, new, set(given)), unknown(old, new, set(given))
    if lacking:
        fields = ", ".join(f"{name} ({ATTRIBUTES[name].field})" for name in lacking)
        return f"The move from {old} to {new} requires {fields}, which the call did not give."
    if surplus:
        return f"The move from {old} to {new} takes no {', '.join(surplus)}."
    if (old, new) in (("SQD", "RESET"), ("SQD", "RTS"), ("SQD", "SQD")) and not given:
        one = DIFFERENCES["sqd-draining"]
        return f"Its send queue may still be draining: {one.here}. So {one.so}."
    return (
        about_the_way(given, values, errno)
        or about_values(given, values)
        or ("The states and the set of attributes are right, so it is a value that was refused.")
    )


def no_such_move(old: str, new: str) -> str:
    """For a move that the kernel's table does not have: from where the state can be reached."""
    if (old, new) == ("RESET", "ERR"):
        one = DIFFERENCES["reset-to-err"]
        return f"The specification: {one.specification}. Here: {one.here}."
    if new == "SQE":
        return "No program moves a queue pair to SQE: the device does it, and only on UC and UD."
    ways = sorted({move.old for move in MOVES.values() if move.new == new and move.old != new})
    return f"There is no move from {old} to {new}: {new} can be reached from {', '.join(ways)}."


def about_the_way(given: tuple[str, ...], values: Mapping[str, Any], errno: str) -> str:
    """What may be wrong with the way to the peer."""
    if "AV" not in given:
        return ""
    gid = str(values.get("dgid", "")).strip()
    if not gid:
        return (
            "The way to the peer has no GID (is_global=0, no GRH). On RoCE every packet has an IP"
            " header, so it needs the peer's GID and the row of our own."
        )
    if errno == "ENODATA":
        return (
            f"Row {values.get('sgid_index')} of our GID table is empty: rdmalab.here.gid_index"
            " tells the row that holds our address now."
        )
    if errno in ("ETIMEDOUT", "EHOSTUNREACH", "ENETUNREACH"):
        mapped = ipaddress.IPv6Address(gid).ipv4_mapped
        return (
            f"Nobody answered when the kernel asked for the Ethernet address of {mapped or gid}"
            " (ARP, or neighbour discovery): there is no such host on this link, or the link is"
            " down."
        )
    return ""


def about_values(given: tuple[str, ...], values: Mapping[str, Any]) -> str:
    """Which value is out of its range, or does not go with another."""
    said = []
    limits = {"timeout": 31, "retry_cnt": 7, "rnr_retry": 7, "min_rnr_timer": 31}
    for key in (key for attribute in given for key in inputs_of(attribute)):
        value = values.get(key, "")
        if key in limits and not 0 <= number(key, value) <= limits[key]:
            said.append(f"{key} has {limits[key].bit_length()} bits: 0 to {limits[key]}.")
        if key in ("max_rd_atomic", "max_dest_rd_atomic") and number(key, value) > 128:
            said.append(f"{key}: this device keeps at most 128 READs and atomics under way.")
        if key == "path_mtu" and number(key, value) not in PATH_MTUS:
            said.append(f"{value} is no path MTU; these exist: {', '.join(map(str, PATH_MTUS))}.")
        if key == "port_num" and number(key, value) != 1:
            said.append("The device has one port, number 1.")
    if "AV" in given:
        said.append(
            "If it is the way to the peer: both GIDs must be of one kind. Row 0 is usually the"
            " link-local IPv6 GID, which does not go with an IPv4-mapped one."
        )
    return " ".join(said)
