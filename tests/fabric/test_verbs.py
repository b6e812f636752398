"""rdmalab.verbs between alice and bob: open, connect, every operation, and what waits say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import rdmalab

pytestmark = [pytest.mark.fabric, pytest.mark.timeout(300)]

CLOSE = "if 'ep' in globals(): ep.close()"
OPEN = "from rdmalab.verbs import Endpoint\nep = Endpoint({})"


def value(host: rdmalab.Host, expression: str) -> Any:
    """What an expression is on a host."""
    host.run(f"_answer = {expression}")
    return host.get("_answer")


def both(lab: rdmalab.Lab, settings: str = "") -> None:
    """A connected endpoint ``ep`` on both hosts, which met by name."""
    for host in lab.hosts:
        host.run(CLOSE)
        host.run(OPEN.format(settings))
    job = lab.bob.start("ep.connect('alice')", timeout_s=30)
    lab.alice.run("ep.connect('bob')")
    job.result()


@pytest.fixture
def pair(shared_lab: rdmalab.Lab) -> Iterator[rdmalab.Lab]:
    """Hosts with a fresh, connected endpoint each."""
    both(shared_lab)
    yield shared_lab
    for host in shared_lab.hosts:
        host.run(CLOSE)


def test_every_operation_moves_the_right_bytes(pair: rdmalab.Lab) -> None:
    alice, bob = pair.alice, pair.bob
    assert value(alice, "ep.state") == value(bob, "ep.state") == "RTS"
    assert value(alice, "ep.peer.as_dict() ") == value(bob, "ep.card.as_dict()")
    bob.run("ep.post_recv(100, 50)")
    alice.run("ep.send(b'hello bob')")
    assert value(bob, "ep.recv()") == b"hello bob"
    assert value(bob, "ep.buffer[100:109]") == b"hello bob"
    alice.run("ep.write(b'a note', 2000)")
    assert value(bob, "ep.buffer[2000:2006]") == b"a note"
    bob.run("ep.buffer[3000:3004] = b'read'")
    assert value(alice, "ep.read(3000, 4)") == b"read"
    bob.run("ep.buffer[64:72] = (37).to_bytes(8, 'little')")
    assert value(alice, "ep.fetch_add(64, 5)") == 37
    assert value(alice, "ep.compare_swap(64, 41, 1)") == 42
    assert value(alice, "ep.compare_swap(64, 42, 1)") == 42
    assert value(bob, "int.from_bytes(ep.buffer[64:72], 'little')") == 1


def test_posted_orders_complete_in_words(pair: rdmalab.Lab) -> None:
    alice, bob = pair.alice, pair.bob
    bob.run("ep.post_recv(0, 64); ep.post_recv(64, 64)")
    alice.run("ep.buffer[0:4] = b'ping'")
    alice.run("ids = [ep.post_send(0, 4, imm=7), ep.post_write(0, 4, 1000, imm=0xabcd)]")
    alice.run("done = [(c.wr_id, c.operation, c.status) for c in ep.wait(2)]")
    ids = value(alice, "ids")
    assert value(alice, "done") == [
        [ids[0], "SEND_WITH_IMM", "IBV_WC_SUCCESS"],
        [ids[1], "RDMA_WRITE_WITH_IMM", "IBV_WC_SUCCESS"],
    ]
    bob.run("done = [(c.operation, c.byte_len, c.imm) for c in ep.wait(2, queue='recv')]")
    assert value(bob, "done") == [["RECV", 4, 7], ["RECV", 4, 0xABCD]]
    assert value(bob, "ep.buffer[1000:1004]") == b"ping"


def test_the_card_may_come_another_way(shared_lab: rdmalab.Lab) -> None:
    """Two endpoints of one host, whose cards a variable carries; and a card as JSON."""
    shared_lab.alice.run(
        "import json\n"
        "from rdmalab.verbs import Endpoint\n"
        "with Endpoint() as a, Endpoint() as b:\n"
        "    a.connect_card(json.loads(json.dumps(b.card.as_dict())))\n"
        "    b.connect_card(a.card)\n"
        "    a.write(b'inside', 5)\n"
        "    seen = b.buffer[5:11]\n"
    )
    assert shared_lab.alice.get("seen") == b"inside"
