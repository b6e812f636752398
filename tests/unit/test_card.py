"""The address card and the meeting at which two hosts swap it: exact, bounded, and in sentences."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from rdmalab.hostside.card import LARGEST, Card, Meeting, fit
from rdmalab.hostside.mishaps import CardError

LOW, HIGH = "127.0.0.1", "127.0.0.2"  # the lower one listens


def card(**other: Any) -> Card:
    facts: dict[str, Any] = {
        "name": "alice",
        "gid": "::ffff:10.0.0.1",
        "qpn": 17,
        "psn": 0,
        "path_mtu": 4096,
        "reads_out": 16,
        "reads_in": 16,
        "address": 0x7FFF_1234_5678_9ABC,
        "length": 4096,
        "rkey": 0xFFFF_FFFF,
    }
    return Card(**{**facts, **other})


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind((LOW, 0))
        port: int = sock.getsockname()[1]
        return port


def beside(work: Callable[[], Any]) -> Callable[[], Any]:
    """Run ``work`` in a thread; the answer waits for what it returned or raised."""
    got: list[Any] = []

    def run() -> None:
        try:
            got.append(work())
        except BaseException as error:
            got.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def answer() -> Any:
        thread.join(20)
        assert got, "the other side is still at it"
        return got[0]

    return answer


# ---------------------------------------------------------------- the card itself


def test_b38_wide_numbers_stay_exact() -> None:
    """B38: 64 bits of address and 32 of key, through JSON and back."""
    there = Card.from_dict(json.loads(json.dumps(card().as_dict())))
    assert there == card()
    assert (there.address, there.rkey) == (0x7FFF_1234_5678_9ABC, 0xFFFF_FFFF)


def test_b38_wide_numbers_cross_the_socket_exactly() -> None:
    """B38: and over TCP, in both directions."""
    port = free_port()
    high = card(name="bob", gid="::ffff:10.0.0.2", address=2**64 - 4096)

    def other_side() -> Any:
        with Meeting(HIGH, LOW, port=port, deadline_s=10) as meeting:
            return Card.from_dict(meeting.swap(high.as_dict()))

    other = beside(other_side)
    with Meeting(LOW, HIGH, port=port, deadline_s=10) as meeting:
        assert Card.from_dict(meeting.swap(card().as_dict())) == high
    assert other() == card()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"address": 2**64}, "address must be 0 to 0xffffffffffffffff"),
        ({"rkey": -1}, "rkey must be 0 to 0xffffffff, not -1"),
        ({"qpn": 2**24}, "qpn must be 0 to 0xffffff"),
        ({"psn": 1.5}, "psn must be"),
        ({"psn": True}, "psn must be"),
        ({"path_mtu": 1500}, "path_mtu must be one of"),
        ({"gid": "10.0.0.1"}, "'10.0.0.1' is no GID"),
        ({"version": 2}, "version 2, and only 1 is known"),
        ({"name": 5}, "name must be a short text"),
        ({"name": "x" * 1000}, "name must be a short text"),
        ({"rkey": "7"}, "rkey must be"),
        ({"more": 1}, "more unknown"),
    ],
)
def test_what_is_no_card_is_refused_with_the_field(change: dict[str, Any], words: str) -> None:
    with pytest.raises(CardError, match=words):
        Card.from_dict({**card().as_dict(), **change})


@pytest.mark.parametrize("data", [None, [], "card", 7, {}, {"qpn": 1}])
def test_anything_else_is_refused_in_a_sentence(data: Any) -> None:
    with pytest.raises(CardError, match=r"a card is a dict|missing"):
        Card.from_dict(data)


# ---------------------------------------------------------------- the agreement


def test_b14_the_smaller_path_mtu_holds() -> None:
    """B14: whichever side has it."""
    small, large = card(path_mtu=1024), card(path_mtu=4096)
    assert fit(small, large).path_mtu == fit(large, small).path_mtu == 1024


def test_b25_each_direction_takes_the_smaller_read_depth() -> None:
    """B25: what one side keeps under way, the other must be able to answer."""
    mine, peer = card(reads_out=16, reads_in=4), card(reads_out=2, reads_in=1)
    agreed = fit(mine, peer)
    assert (agreed.max_rd_atomic, agreed.max_dest_rd_atomic) == (1, 2)
    other = fit(peer, mine)
    assert (other.max_rd_atomic, other.max_dest_rd_atomic) == (2, 1)


def test_b10_gids_of_different_kinds_are_told_apart_before_any_move() -> None:
    """B10: link-local on one side, IPv4-mapped on the other."""
    with pytest.raises(CardError) as caught:
        fit(card(name="alice", gid="fe80::1"), card(name="bob", gid="::ffff:10.0.0.2"))
    text = str(caught.value)
    assert "fe80::1 (link-local)" in text and "::ffff:10.0.0.2 (IPv4-mapped)" in text


# ---------------------------------------------------------------- peers that do not play along


def strange_peer(answer: bytes, *, stay_s: float = 0.0) -> tuple[int, Callable[[], Any]]:
    """Something that listens where a peer should, sends ``answer``, and hangs up."""
    listener = socket.socket()
    listener.bind((LOW, 0))
    listener.listen()

    def serve() -> None:
        with listener, listener.accept()[0] as sock:
            sock.sendall(answer)
            time.sleep(stay_s)

    return listener.getsockname()[1], beside(serve)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "something else than rdmalab speaks"),
        (struct.pack("!I", LARGEST + 1), "at most 4096"),
        (struct.pack("!I", 5) + b"nope!", "no JSON"),
        (struct.pack("!I", 4000) + b"[" * 4000, "no JSON"),
        (struct.pack("!I", 100) + b"half", "hung up in the middle"),
        (b"", "hung up in the middle"),
    ],
)
def test_a_strange_peer_gets_a_sentence(answer: bytes, words: str) -> None:
    port, served = strange_peer(answer)
    with (
        pytest.raises(CardError, match=words),
        Meeting(HIGH, LOW, port=port, deadline_s=10) as meeting,
    ):
        meeting.receive()
    served()


def test_a_peer_that_says_nothing_is_left_at_the_deadline() -> None:
    port, served = strange_peer(b"\0", stay_s=2.0)
    with (
        pytest.raises(CardError, match=r"waited 0.3 s for 127.0.0.1 to send"),
        Meeting(HIGH, LOW, port=port, deadline_s=0.3) as meeting,
    ):
        meeting.receive()
    served()


def test_a_peer_that_drips_is_left_at_the_deadline() -> None:
    """Each byte comes in time; all of them together do not."""
    listener = socket.socket()
    listener.bind((LOW, 0))
    listener.listen()
    over = threading.Event()

    def drip() -> None:
        with listener, listener.accept()[0] as sock:
            sock.sendall(struct.pack("!I", 1000))
            while not over.wait(0.05):
                sock.send(b" ")

    dripping = beside(drip)
    try:
        port = listener.getsockname()[1]
        with (
            pytest.raises(CardError, match=r"waited 0.5 s"),
            Meeting(HIGH, LOW, port=port, deadline_s=0.5) as meeting,
        ):
            meeting.receive()
    finally:
        over.set()
    dripping()


@pytest.mark.parametrize(("mine", "peer"), [(LOW, HIGH), (HIGH, LOW)])
def test_a_peer_that_never_comes_is_named(mine: str, peer: str) -> None:
    with pytest.raises(CardError, match=rf"waited 0.3 s for {peer} .*has it called connect"):
        Meeting(mine, peer, port=free_port(), deadline_s=0.3)


def test_who_else_knocks_is_sent_away() -> None:
    """Another address connects first; the peer still gets through."""
    port = free_port()

    def listen() -> Any:
        with Meeting(LOW, HIGH, port=port, deadline_s=10) as meeting:
            return meeting.swap("mine")

    listening = beside(listen)
    stranger = None
    while stranger is None:
        try:
            stranger = socket.create_connection((LOW, port), 5, source_address=("127.0.0.3", 0))
        except ConnectionRefusedError:
            time.sleep(0.01)
    with stranger, Meeting(HIGH, LOW, port=port, deadline_s=10) as meeting:
        assert meeting.swap("theirs") == "mine"
    assert listening() == "theirs"


def test_hosts_that_share_an_address_meet_by_name() -> None:
    """On one device for all hosts; two pairs at once do not get in each other's way."""
    port = free_port()

    def meet(name: str, peer: str) -> Any:
        with Meeting(LOW, LOW, names=(name, peer), port=port, deadline_s=10) as meeting:
            return meeting.swap(name)

    pairs = [("bob", "alice"), ("dave", "carol"), ("alice", "bob"), ("carol", "dave")]
    answers = [beside(partial(meet, *pair)) for pair in pairs]
    assert [answer() for answer in answers] == ["alice", "carol", "bob", "dave"]


def test_one_host_does_not_meet_itself() -> None:
    with pytest.raises(CardError, match="connect_card"):
        Meeting(LOW, LOW)
