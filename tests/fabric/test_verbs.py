"""rdmalab.verbs between alice and bob: open, connect, each operation, and what a learner sees."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import rdmalab

from .endpoints import CLOSE, connect, counters, text_of, value

pytestmark = [pytest.mark.fabric, pytest.mark.timeout(300)]


@pytest.fixture
def pair(shared_lab: rdmalab.Lab) -> Iterator[rdmalab.Lab]:
    """Hosts with a fresh, connected endpoint each."""
    connect(shared_lab)
    yield shared_lab
    for host in shared_lab.hosts:
        host.run(CLOSE)


def test_every_operation_moves_the_right_bytes(pair: rdmalab.Lab) -> None:
    alice, bob = pair.alice, pair.bob
    assert value(alice, "ep.state") == value(bob, "ep.state") == "RTS"
    assert value(alice, "ep.peer.as_dict()") == value(bob, "ep.card.as_dict()")
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


def test_what_was_posted_before_is_not_lost_to_a_helper(pair: rdmalab.Lab) -> None:
    """``write`` waits for its own order; the completions of others stay for ``wait``."""
    pair.alice.run(
        "first = ep.post_read(0, 8, 0); ep.write(b'x', 9); second = ep.post_read(0, 8, 0)"
    )
    assert value(pair.alice, "[c.wr_id for c in ep.wait(2)] == [first, second]")


def test_a_closed_endpoint_says_so_and_keeps_its_bytes(pair: rdmalab.Lab) -> None:
    pair.alice.run("ep.write(b'x', 0); ep.buffer[0:4] = b'kept'; ep.close(); ep.close()")
    for code in ("ep.state", "ep.post_write(0, 1, 0)", "ep.wait()", "ep.card", "ep.events"):
        assert "endpoint is closed" in text_of(pair.alice, code, "EndpointError"), code
    assert value(pair.alice, "ep.buffer[0:4]") == b"kept"


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
        "a.close()\n"
    )
    assert shared_lab.alice.get("seen") == b"inside"


def test_b10_the_gid_is_chosen_by_value(shared_lab: rdmalab.Lab) -> None:
    """B10: the IPv4-mapped GID of the host's own address; ibv_devinfo is the witness."""
    for host in shared_lab.hosts:
        host.run("from rdmalab.verbs import Endpoint\nwith Endpoint() as ep: gid = ep.card.gid")
        assert host.get("gid") == f"::ffff:{host.ip}"
        host.run(
            "import subprocess; told = subprocess.check_output(['ibv_devinfo','-v'], text=True)"
        )
        row = value(host, "ep.gid_index")
        assert f"GID[{row:3d}]:" in host.get("told").replace("\t", "")
        (line,) = [part for part in host.get("told").splitlines() if f"GID[{row:3d}]" in part]
        assert f"::ffff:{host.ip}" in line


@pytest.mark.parametrize(
    ("alice", "bob", "agreed"),
    [(1024, 4096, 1024), pytest.param(4096, 512, 512, marks=pytest.mark.long)],
)
def test_b14_the_smaller_path_mtu_holds_and_every_size_arrives(
    shared_lab: rdmalab.Lab, alice: int, bob: int, agreed: int
) -> None:
    """B14: different path MTUs; WRITE and READ around the MTU and well above it, both ways."""
    sizes = "size=65536, timeout=16, path_mtu="
    connect(shared_lab, f"{sizes}{alice}", f"{sizes}{bob}")
    for host in shared_lab.hosts:
        assert value(host, "ep.agreed.path_mtu") == agreed
        assert value(host, "128 << ep.qp.query(1 << 8)[0].path_mtu") == agreed  # IBV_QP_PATH_MTU
        host.run("import os\nsizes = (1, agreed := ep.agreed.path_mtu, agreed + 1, 4096, 65536)")
        host.run(
            "for size in sizes:\n"
            "    data = os.urandom(size)\n"
            "    ep.write(data, 0)\n"
            "    assert ep.read(0, size) == data, size"
        )


def test_b17_the_reference_ping_pong_meets_no_missing_receive(shared_lab: rdmalab.Lab) -> None:
    """B17: receives posted before anybody can send, and again before each answer: no RNR."""
    connect(shared_lab, prepare="ep.post_recv(0, 8)")
    alice, bob = shared_lab.alice, shared_lab.bob
    before = {name: counters(shared_lab, name) for name in ("alice", "bob")}
    rounds = 200
    job = bob.start(
        f"for _ in range({rounds}):\n"
        "    ep.wait(queue='recv')\n"
        "    ep.post_recv(0, 8)\n"
        "    ep.post_send(8, 8)\n"
        "    ep.wait(queue='send')",
        timeout_s=100,
    )
    alice.run(
        f"for _ in range({rounds}):\n"
        "    ep.post_send(8, 8)\n"
        "    ep.wait(queue='recv')\n"
        "    ep.post_recv(0, 8)\n"
        "    ep.wait(queue='send')",
        timeout_s=100,
    )
    job.result()
    for name, then in before.items():
        now = counters(shared_lab, name)
        for counter in ("send_rnr_err", "rcvd_rnr_err"):
            assert now[counter] == then[counter], (name, counter)
        assert now["rcvd_pkts"] - then["rcvd_pkts"] >= rounds


def test_b17_a_receive_posted_late_shows_in_the_counter(pair: rdmalab.Lab) -> None:
    """B17: the same without a receive: the receiver's device says RNR, and counts it."""
    before = counters(pair, "bob")["send_rnr_err"]
    pair.alice.run("ep.post_send(0, 8)")
    deadline = 50
    while counters(pair, "bob")["send_rnr_err"] == before and deadline:
        deadline -= 1
    assert counters(pair, "bob")["send_rnr_err"] > before
    text = text_of(pair.alice, "ep.wait()", "CompletionError")
    assert "IBV_WC_RNR_RETRY_EXC_ERR" in text and "no receive was posted" in text


def test_b31_no_wait_is_missed_however_early_the_work_is_done(pair: rdmalab.Lab) -> None:
    """B31: a completion that came before the arming is returned, 200 times; no event is needed."""
    pair.alice.run(
        "import time\n"
        "late = 0\n"
        "for _ in range(200):\n"
        "    ep.post_write(0, 8, 0)\n"
        "    while not ep.arrivals.collect(): pass\n"
        "    (done,) = ep.wait_event(timeout_s=2, queue='send')\n"
        "    late += not done.ok"
    )
    assert value(pair.alice, "late") == 0


def test_b31_one_event_may_stand_for_many_completions(pair: rdmalab.Lab) -> None:
    """B31: 16 completions, whatever the number of events; then the queue closes at once."""
    pair.alice.run("for _ in range(16): ep.post_write(0, 8, 0)")
    pair.alice.run("got = len(ep.wait_event(16, timeout_s=5))")
    assert value(pair.alice, "got") == 16
    pair.alice.run("ep.post_write(0, 8, 0); ep.wait_event(); ep.close()")


def test_b31_a_sleeping_wait_is_woken_by_the_peer(pair: rdmalab.Lab) -> None:
    """B31: the receiver sleeps before the message is sent, and uses next to no CPU meanwhile."""
    pair.bob.run("ep.post_recv(0, 64)")
    job = pair.bob.start(
        "import time\ncpu = time.process_time()\n(done,) = ep.wait_event(timeout_s=20)\n"
        "cpu = time.process_time() - cpu",
        timeout_s=40,
    )
    pair.alice.run("import time; time.sleep(1.0); ep.send(b'wake up')")
    job.result()
    assert value(pair.bob, "(done.byte_len, cpu < 0.5)") == [7, True]


def test_b36_a_fork_after_registering_harms_neither_side(pair: rdmalab.Lab) -> None:
    """B36: an odd size, a shell command, a forked child that writes memory; then a WRITE comes."""
    connect(pair, "size=5001", "size=5001")
    bob = pair.bob
    bob.run("from rdmalab.verbs import fork_status; status = fork_status()")
    assert bob.get("status").split(":")[0] in ("enabled", "unneeded")
    bob.run("import subprocess; said = subprocess.check_output(['echo', 'hi'])")
    bob.run(
        "import multiprocessing, sys, warnings\n"
        "def child():\n"
        "    numbers = [n * n for n in range(10_000)]\n"
        "    ep.buffer[5000] = 99  # its own copy\n"
        "    sys.exit(0 if numbers[-1] == 9999**2 else 1)\n"
        "with warnings.catch_warnings():\n"
        "    warnings.simplefilter('ignore', DeprecationWarning)  # threads and fork: meant so\n"
        "    process = multiprocessing.get_context('fork').Process(target=child)\n"
        "    process.start()\n"
        "process.join(30)\n"
    )
    assert value(bob, "process.exitcode") == 0
    pair.alice.run("ep.write(b'after the fork', 4987)")
    assert value(bob, "ep.buffer[4987:5001]") == b"after the fork"
    assert value(bob, "ep.buffer.address % 4096") == 0


@pytest.mark.long
def test_b38_a_record_is_never_seen_torn(shared_lab: rdmalab.Lab) -> None:
    """B38: 8 KiB, written anew again and again; the reader trusts a checksum, not the moment."""
    connect(shared_lab, "size=16384", "size=16384")
    bob, alice = shared_lab.bob, shared_lab.alice
    alice.run(
        "import os, zlib\n"
        "def record(version):\n"
        "    body = version.to_bytes(8, 'little') + os.urandom(8) * 1022\n"
        "    return body + zlib.crc32(body).to_bytes(8, 'little')\n"
        "def publish(versions):\n"
        "    for version in versions:\n"
        "        ep.write(record(version), 0)\n"
        "publish([1])"
    )
    bob.run(
        "import time, zlib\n"
        "def look():\n"
        "    seen = ep.buffer[0:8192]\n"
        "    whole = zlib.crc32(seen[:-8]) == int.from_bytes(seen[-8:], 'little')\n"
        "    return int.from_bytes(seen[:8], 'little') if whole else None\n"
        "def follow(last):\n"
        "    versions, torn, end = [], 0, time.monotonic() + 60\n"
        "    while not versions or versions[-1] < last:\n"
        "        version = look()\n"
        "        torn += version is None\n"
        "        if version is not None: versions.append(version)\n"
        "        if time.monotonic() > end: break\n"
        "    return versions, torn"
    )
    job = bob.start("versions, torn = follow(300)", timeout_s=90)
    alice.run("publish(range(2, 301))", timeout_s=90)
    job.result()
    versions = bob.get("versions")
    assert versions == sorted(versions) and versions[-1] == 300
    print(f"{len(versions)} looks saw a whole record, {bob.get('torn')} a torn one and knew it")


@pytest.mark.long
def test_b38_an_immediate_tells_the_target_when(pair: rdmalab.Lab) -> None:
    """B38: the other cure: WRITE with immediate; whoever has its completion has all the bytes."""
    connect(pair, "size=8192", "size=8192", prepare="for _ in range(8): ep.post_recv(0, 0)")
    job = pair.bob.start(
        "import zlib\n"
        "whole = []\n"
        "for _ in range(40):\n"
        "    (done,) = ep.wait(queue='recv', timeout_s=20)\n"
        "    whole.append(zlib.crc32(ep.buffer[0:8192]) == done.imm)\n"
        "    ep.post_recv(0, 0)\n"
        "    ep.write(b'next', 0)",
        timeout_s=90,
    )
    pair.alice.run(
        "import os, time, zlib\n"
        "for _ in range(40):\n"
        "    ep.buffer[0:8192] = os.urandom(16) * 512\n"
        "    ep.post_write(0, 8192, 0, imm=zlib.crc32(ep.buffer[0:8192]))\n"
        "    ep.wait(queue='send')\n"
        "    end = time.monotonic() + 20\n"
        "    while ep.buffer[0:4] != b'next' and time.monotonic() < end: os.sched_yield()",
        timeout_s=90,
    )
    job.result()
    assert pair.bob.get("whole") == [True] * 40


def test_explain_prints_a_page_that_runs(shared_lab: rdmalab.Lab) -> None:
    """What ``explain`` shows is raw pyverbs, and does what it says: two ends of it, connected."""
    shared_lab.alice.run(
        "import contextlib, io\n"
        "from rdmalab.verbs import Endpoint\n"
        "shown = io.StringIO()\n"
        "with contextlib.redirect_stdout(shown): Endpoint.explain()\n"
        "page = shown.getvalue()"
    )
    page = shared_lab.alice.get("page")
    for call in ("Context(", "PD(", "CQ(", "MR(", "QP(", "qp.modify(", "SGE(", "SendWR(", "poll("):
        assert call in page, call
    assert "Any" not in page and "modify(qp" not in page
    shared_lab.alice.run(
        "import queue, threading\n"
        "from rdmalab.ledger import Order\n"
        "names = {}\n"
        "exec(page, names)\n"
        "way = {'a': queue.Queue(), 'b': queue.Queue()}\n"
        "ends = {}\n"
        "def bring_up(me, other):\n"
        "    def swap(card):\n"
        "        way[other].put(card)\n"
        "        return way[me].get(timeout=10)\n"
        "    ends[me] = names['plain_endpoint'](swap)\n"
        "threads = [threading.Thread(target=bring_up, args=pair) for pair in ('ab', 'ba')]\n"
        "for thread in threads: thread.start()\n"
        "for thread in threads: thread.join(20)\n"
        "qp, scq, rcq, mr, peer, rest = ends['a']\n"
        "mr.write(b'plain', 5, 0)\n"
        "order = Order(1, 'RDMA_WRITE', 0, 5, 1000)\n"
        "qp.post_send(names['send_request'](order, mr, peer))\n"
        "status = names['plain_wait'](scq)[0].status\n"
        "seen = ends['b'][3].read(5, 1000)\n"
        "for end in ends.values(): end[5][0].close()"
    )
    assert value(shared_lab.alice, "(status, seen.decode())") == [0, "plain"]
