"""A refused call in words: each cause has its own text, and the text names what is wrong."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from rdmalab.hostside import refusals
from rdmalab.hostside.qpstate import MOVES, REQUIRED

RTR: dict[str, Any] = dict.fromkeys(("STATE", *REQUIRED["RC"]["RTR"]), 1)
LIMITS = {"PORT": 1, "PATH_MTU": 5, "TIMEOUT": 31}


def way(**other: Any) -> refusals.Way:
    facts: dict[str, Any] = {
        "is_global": True,
        "port": 1,
        "ports": 1,
        "sgid_index": 1,
        "sgid": "::ffff:10.0.0.1",
        "kind": "IPv4-mapped",
        "dgid": "::ffff:10.0.0.2",
        "peer_kind": "IPv4-mapped",
        "peer_ip": "10.0.0.2",
        "right_index": 1,
    }
    return refusals.Way(**{**facts, **other})


def rtr(number: int = errno.EINVAL, sent: dict[str, Any] = RTR, **other: Any) -> str:
    return refusals.move("INIT", "RTR", sent, number, way(**other), LIMITS)


@pytest.mark.parametrize("name", REQUIRED["RC"]["RTR"])
def test_each_missing_attribute_is_named(name: str) -> None:
    sent = {key: value for key, value in RTR.items() if key != name}
    assert f"IBV_QP_{name} is missing" in rtr(sent=sent)


def test_what_is_not_missing_is_not_blamed() -> None:
    assert "missing" not in rtr() and "one of the values is wrong" in rtr()


def test_each_rule_of_roce_that_is_broken_has_its_own_words() -> None:
    texts = [
        rtr(is_global=False),
        rtr(sgid="", sgid_index=9),
        rtr(sgid="fe80::1", kind="link-local", sgid_index=0),
        rtr(port=2),
        rtr(sent={**RTR, "QKEY": 7}),
        rtr(sent={**RTR, "PATH_MTU": 6}),
    ]
    words = ("is_global=0", "is empty", "link-local GID fe80::1", "port_num is 2", "QKEY", "5 at")
    for own, text in zip(words, texts, strict=True):
        assert own in text
        assert sum(word in text for word in words) == 1, text
        assert "EINVAL" in text and "from INIT to RTR" in text


@pytest.mark.parametrize("number", [errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH])
def test_b12_no_answer_names_the_peer_and_the_checks(number: int) -> None:
    text = rtr(number, checks="Now: eth0 is up.")
    assert "10.0.0.2 is unreachable" in text and "eth0 is up" in text
    assert errno.errorcode[number] in text


@pytest.mark.parametrize(
    ("old", "new"),
    [(a, b) for a in ("RESET", "INIT", "RTR", "RTS", "SQD", "ERR") for b in ("INIT", "RTR", "RTS")],
)
def test_a_move_that_does_not_exist_shows_those_that_do(old: str, new: str) -> None:
    text = refusals.move(old, new, {"STATE": 1}, errno.EINVAL, None, LIMITS)
    assert ("There is no such move" in text) == ((old, new) not in MOVES)


def test_b04_memory_that_does_not_fit_is_counted() -> None:
    text = refusals.memory(1 << 20, "local_write", errno.ENOMEM, 65_536, 8192)
    for words in ("1 MiB", "memlock", "64 KiB", "8 KiB are pinned", "56 KiB"):
        assert words in text, words
    other = refusals.memory(4096, "local_write", errno.ENOMEM, 65_536, 8192)
    assert "memlock" not in other, "it would have fitted: something else is short"


def test_amounts_are_exact() -> None:
    assert [refusals.amount(n) for n in (0, 100, 1024, 1536, 1 << 20, 65_536)] == [
        "0 bytes",
        "100 bytes",
        "1 KiB",
        "1536 bytes",
        "1 MiB",
        "64 KiB",
    ]


def test_posting_is_refused_for_the_state_first() -> None:
    facts = {"length": 8, "inline": False, "max_inline": 0, "remote": 0}
    assert "is in INIT" in refusals.post("SEND", errno.EINVAL, "INIT", facts)
    assert "is in RESET" in refusals.post("RECV", errno.EINVAL, "RESET", facts)
    inline = {**facts, "inline": True, "length": 401, "max_inline": 400}
    assert "401 bytes inline" in refusals.post("SEND", errno.EINVAL, "RTS", inline)
    odd = {**facts, "remote": 4}
    assert "multiple of 8" in refusals.post("ATOMIC_CMP_AND_SWP", errno.EINVAL, "RTS", odd)
