"""The table of states against a real device: every move, every attribute, every posting.

All of it runs in alice's kernel; queue pairs are connected to themselves or to one beside them. The
witness of a state is ``rdma resource show qp``, which asks the kernel and not libibverbs. A kernel
that behaves otherwise makes a test fail, and the sentence says where the table must change.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

import rdmalab
from rdmalab.hostside import qpstate
from rdmalab.hostside.qpstate import DIFFERENCES, MOVES, POSTING, REQUIRED, STATES

pytestmark = [pytest.mark.fabric, pytest.mark.long, pytest.mark.timeout(300)]

SET_UP = """
import errno, itertools, json, os, select, subprocess, time
import pyverbs.enums as e
from pyverbs.addr import AHAttr, GID, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.pyverbs_error import PyverbsRDMAError
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR
from rdmalab import here, qpstate

ctx = Context(name=here.device)
pd = PD(ctx)
scq, rcq = CQ(ctx, 64), CQ(ctx, 64)
mr = MR(pd, 4096, e.IBV_ACCESS_LOCAL_WRITE)
DEVICE, PORT, INDEX = here.device, here.port, here.gid_index
OWN = ctx.query_gid(PORT, INDEX).gid  # in the long form, which is the only one that pyverbs takes
WAYS = {
    "RESET": (), "INIT": ("INIT",), "RTR": ("INIT", "RTR"), "RTS": ("INIT", "RTR", "RTS"),
    "SQD": ("INIT", "RTR", "RTS", "SQD"), "ERR": ("INIT", "ERR"),
}

def new(kind="RC"):
    drain(scq), drain(rcq)
    room = QPCap(max_send_wr=8, max_recv_wr=8, max_send_sge=1, max_recv_sge=1)
    return QP(pd, QPInitAttr(qp_type=e.ibv_qp_type[f"IBV_QPT_{kind}"], scq=scq, rcq=rcq, cap=room))

def attributes(peer, gid=None, index=None):
    attr = QPAttr(port_num=PORT)
    attr.qp_access_flags, attr.path_mtu, attr.qkey = e.IBV_ACCESS_REMOTE_WRITE, e.IBV_MTU_1024, 17
    attr.dest_qp_num, attr.rq_psn, attr.sq_psn = peer.qp_num, 1000, 1000
    attr.max_rd_atomic = attr.max_dest_rd_atomic = 1
    attr.min_rnr_timer, attr.timeout, attr.retry_cnt, attr.rnr_retry = 12, 12, 1, 1
    route = GlobalRoute(dgid=GID(gid or OWN), sgid_index=INDEX if index is None else index)
    attr.ah_attr = AHAttr(gr=route, is_global=1, port_num=PORT)
    return attr

def ask(qp, new_state, names, attr=None):
    # The errno's name, or "" when the move was made.
    attr = attr or attributes(qp)
    attr.qp_state = e.ibv_qp_state[f"IBV_QPS_{new_state}"]
    mask = e.IBV_QP_STATE
    for name in names:
        mask |= e.ibv_qp_attr_mask[f"IBV_QP_{name}"]
    try:
        qp.modify(attr, mask)
    except PyverbsRDMAError as error:
        return errno.errorcode[error.error_code]
    return ""

def bring(qp, state, peer=None, kind="RC"):
    for step in WAYS[state]:
        said = ask(qp, step, qpstate.REQUIRED[kind].get(step, ()), attributes(peer or qp))
        assert not said, (step, said)
    if state == "SQD":
        until_drained(qp)

def until_drained(qp):
    # SQD is entered at once, but the device finishes what was begun in its own time.
    end = time.monotonic() + 5
    while qp.query(e.IBV_QP_STATE)[0].sq_draining:
        assert time.monotonic() < end, "the send queue does not drain"
        os.sched_yield()

def state(qp):
    # By ibv_query_qp, and by the kernel's own list.
    asked = e.ibv_qp_state(qp.query(e.IBV_QP_STATE)[0].qp_state).name.removeprefix("IBV_QPS_")
    return [asked, resource(qp)["state"]]

def resource(qp):
    shown = subprocess.check_output(
        ["rdma", "-j", "resource", "show", "qp", "link", DEVICE, "lqpn", str(qp.qp_num)])
    (row,) = [row for row in json.loads(shown) if row["lqpn"] == qp.qp_num]
    return row

def drain(queue, seconds=0.0):
    got, end = [], time.monotonic() + seconds
    while True:
        count, found = queue.poll()
        got += [[w.wr_id, e.ibv_wc_status(w.status).name.removeprefix("IBV_WC_")] for w in found]
        if count == 0 and (time.monotonic() >= end or got):
            return got
        os.sched_yield()

def post_recv(qp, number=1):
    return posted(lambda: qp.post_recv(RecvWR(
        wr_id=number, num_sge=1, sg=[SGE(mr.buf, 64, mr.lkey)])))

def post_send(qp, number=2, lkey=None):
    return posted(lambda: qp.post_send(SendWR(
        wr_id=number, opcode=e.IBV_WR_SEND, num_sge=1,
        sg=[SGE(mr.buf + 1024, 16, mr.lkey if lkey is None else lkey)])))

def posted(call):
    try:
        call()
    except PyverbsRDMAError as error:
        return errno.errorcode[error.error_code]
    return ""

def events(seconds=0.3):
    # The names of the asynchronous events that came.
    fd, got = None, []
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue
        if target == "anon_inode:[infinibandevent]":
            fd = int(entry)
    while select.select([fd], [], [], seconds)[0]:
        event = ctx.get_async_event()
        got.append(e.ibv_event_type(event.event_type).name.removeprefix("IBV_EVENT_"))
        event.ack()
    return got
"""

EVERY_MOVE = """
moves = []
for old, target in itertools.product(WAYS, qpstate.STATES):
    usual = qpstate.REQUIRED["RC"].get(target, ())
    move = qpstate.MOVES.get((old, target))
    for names in {(), usual} if move is None else {move.required}:
        with new() as qp:
            bring(qp, old)
            said = ask(qp, target, names)
            moves.append([old, target, said, *state(qp)])
"""

EVERY_ATTRIBUTE = """
left_out, optional, foreign = [], [], []
for (old, target), move in qpstate.MOVES.items():
    if old == "SQE":
        continue
    for name in move.required:
        with new() as qp:
            bring(qp, old)
            said = ask(qp, target, [other for other in move.required if other != name])
            left_out.append([old, target, name, said, state(qp)[1]])
    for name in sorted({*qpstate.ATTRIBUTES} - {"STATE", *move.required}):
        with new() as qp:
            bring(qp, old)
            attr = attributes(qp)
            attr.cur_qp_state = e.ibv_qp_state[f"IBV_QPS_{old}"]
            said = ask(qp, target, [*move.required, name], attr)
            (optional if name in move.optional else foreign).append([old, target, name, said])
others = []
for kind in ("UC", "UD"):
    for old, target in (("RESET", "INIT"), ("INIT", "RTR"), ("RTR", "RTS")):
        required = qpstate.REQUIRED[kind][target]
        for name in ("", *required):
            with new(kind) as qp:
                bring(qp, old, kind=kind)
                said = ask(qp, target, [other for other in required if other != name])
                others.append([kind, target, name, said, state(qp)[1]])
"""

EVERY_POSTING = """
posting = {}
for name in WAYS:
    with new() as peer, new() as qp:
        bring(peer, "RTS", qp)
        post_recv(peer, 70)
        bring(qp, name, peer)
        received, sent = post_recv(qp), post_send(qp)
        posting[name] = [received, sent, drain(scq, 0.3), drain(rcq)]
"""


@pytest.fixture(scope="module")
def alice(start_shared: Callable[[], rdmalab.Lab]) -> rdmalab.Host:
    shared_lab = start_shared()
    shared_lab.alice.restart()
    shared_lab.alice.run(SET_UP)
    return shared_lab.alice


@pytest.fixture(scope="module")
def moves(alice: rdmalab.Host) -> Any:
    alice.run(EVERY_MOVE)
    return alice.get("moves")


def test_every_move_is_what_the_table_says(moves: Any) -> None:
    tried = {(old, new) for old, new, *_ in moves}
    assert tried == set(itertools.product([s for s in STATES if s != "SQE"], STATES))
    for old, new, said, asked, shown in moves:
        expected = "" if (old, new) in MOVES else "EINVAL"
        assert said == expected, (
            f"{old} to {new}: the table says {expected or 'ok'}, this kernel {said or 'ok'}:"
            " correct MOVES or DIFFERENCES"
        )
        assert asked == shown == (old if said else new), (
            f"{old} to {new} left it in {asked}, {shown}"
        )


def test_the_kernels_one_departure_from_the_specification(moves: Any) -> None:
    """IBTA 10.3: to RESET and to ERR from every state. Linux: not from RESET to ERR."""
    to_err = {old: said for old, new, said, *_ in moves if new == "ERR"}
    refused = [old for old, said in to_err.items() if said]
    assert refused == ["RESET"], (
        f"to ERR is refused from {refused}: see DIFFERENCES['reset-to-err']"
    )
    assert not any(said for _, new, said, *_ in moves if new == "RESET")


@pytest.fixture(scope="module")
def attributes(alice: rdmalab.Host) -> Any:
    alice.run(EVERY_ATTRIBUTE, timeout_s=120)
    return {name: alice.get(name) for name in ("left_out", "optional", "foreign", "others")}


def test_a_move_without_one_of_its_attributes_is_refused(attributes: Any) -> None:
    """B13: EINVAL names nothing, so the table has to."""
    assert len(attributes["left_out"]) == 3 + 6 + 5
    for old, new, name, said, shown in attributes["left_out"]:
        assert said == "EINVAL", f"{old} to {new} without {name}: {said or 'accepted'}"
        assert shown == old, f"{old} to {new} without {name} left it in {shown}"


def test_optional_attributes_are_taken_and_others_refused(attributes: Any) -> None:
    for old, new, name, said in attributes["optional"]:
        # The core code bans a second path on RoCE: "APM for IB" only.
        expected = "EINVAL" if name == "ALT_PATH" else ""
        assert said == expected, f"{old} to {new} with {name}: {said or 'accepted'}"
    for old, new, name, said in attributes["foreign"]:
        assert said == "EINVAL", f"{old} to {new} takes {name}: add it to the table"


def test_uc_and_ud_require_less(attributes: Any) -> None:
    for kind, new, name, said, shown in attributes["others"]:
        if name:
            assert said == "EINVAL", f"{kind} to {new} without {name}: {said or 'accepted'}"
        else:
            assert (said, shown) == ("", new), f"{kind} to {new}: {said}"
    assert {kind for kind, *_ in attributes["others"]} == set(REQUIRED) - {"RC"}


def test_what_may_be_posted_in_each_state(alice: rdmalab.Host) -> None:
    """One receive, then one send, in each state; the peer is in RTS and has a receive posted."""
    alice.run(EVERY_POSTING)
    found = alice.get("posting")
    assert set(found) == set(STATES) - {"SQE"}
    for name, (received, sent, on_send_queue, on_receive_queue) in found.items():
        refused = tuple("refused" if said else "" for said in (received, sent))
        table = POSTING[name]
        assert refused == tuple("refused" if what == "refused" else "" for what in table), (
            f"posting in {name}: receive {received or 'taken'}, send {sent or 'taken'};"
            f" the table says {table}"
        )
        assert {said for said in (received, sent) if said} <= {"EINVAL"}
        came = [status for number, status in on_send_queue if number == 2]
        assert came == {"done": ["SUCCESS"], "flushed": ["WR_FLUSH_ERR"]}.get(table.send, []), (
            f"a send posted in {name} came back as {came}; the table says {table.send}"
        )
        if table.receive == "flushed":
            assert [1, "WR_FLUSH_ERR"] in on_receive_queue


def test_a_queue_pair_begins_in_reset_and_with_attributes_in_init(alice: rdmalab.Host) -> None:
    """What pyverbs does beyond the specification: a constructor that makes the first move."""
    alice.run("""
with new() as qp:
    bare = state(qp)
kind = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=scq, rcq=rcq, cap=QPCap(max_send_wr=8, max_recv_wr=8))
with QP(pd, kind, QPAttr(port_num=here.port)) as qp:
    given = state(qp)
""")
    assert alice.get("bare") == ["RESET", "RESET"]
    assert alice.get("given") == ["INIT", "INIT"]


def test_the_library_remembers_and_only_the_kernel_knows(alice: rdmalab.Host) -> None:
    """qp.qp_state is what libibverbs set or asked last: an error of the device is not in it."""
    alice.run("""
with new() as qp:
    bring(qp, "RTS")
    peer = qp.qp_num
    post_send(qp)  # to itself, with no receive: RNR, once repeated, then ERR
    failed = drain(scq, 2)
    before = e.ibv_qp_state(qp.qp_state).name
    shown = resource(qp)["state"]
    asked = state(qp)[0]
    after = e.ibv_qp_state(qp.qp_state).name
""")
    assert alice.get("failed") == [[2, "RNR_RETRY_EXC_ERR"]]
    assert alice.get("before") == "IBV_QPS_RTS"
    assert alice.get("shown") == alice.get("asked") == "ERR"
    assert alice.get("after") == "IBV_QPS_ERR"


def test_held_sends_wait_for_one_more_post(alice: rdmalab.Host) -> None:
    alice.run("""
with new() as peer, new() as qp:
    bring(peer, "RTS", qp), bring(qp, "RTS", peer)
    post_recv(peer, 70), post_recv(peer, 71)
    events(0.0)
    ask(qp, "SQD", ())
    drained = events()
    post_send(qp, 2)
    held = drain(scq, 0.3)
    ask(qp, "RTS", ())
    after_move = drain(scq, 0.5)
    post_send(qp, 3)
    after_post = drain(scq, 1.0) + drain(scq, 0.3)
""")
    assert alice.get("drained") == ["SQ_DRAINED"], f"unasked: {DIFFERENCES['drained-unasked'].here}"
    assert alice.get("held") == []
    assert alice.get("after_move") == [], f"gone: {DIFFERENCES['sqd-holds-on'].here}"
    assert alice.get("after_post") == [[2, "SUCCESS"], [3, "SUCCESS"]]


def test_until_the_queue_has_drained_only_err_is_open(alice: rdmalab.Host) -> None:
    """An order that nobody acknowledges keeps the queue draining, for some milliseconds."""
    alice.run("""
refused, later = {}, {}
for target in ("RTS", "SQD", "RESET", "ERR"):
    refused[target] = set()
    for trial in range(5):
        with new() as peer, new() as qp:  # the peer stays in RESET, and so silent
            bring(qp, "RTS", peer)
            post_send(qp)
            time.sleep(0.01)
            ask(qp, "SQD", ())
            refused[target].add(ask(qp, target, ()))
            if state(qp)[1] == "SQD":
                until_drained(qp)
                later[target] = ask(qp, target, ())
refused = {target: sorted(said - {""}) for target, said in refused.items()}
""")
    assert alice.get("refused") == {
        "RTS": ["EINVAL"],
        "SQD": ["EINVAL"],
        "RESET": ["EINVAL"],
        "ERR": [],
    }, f"not so any more: {DIFFERENCES['sqd-draining'].here}"
    assert set(alice.get("later").values()) == {""}


def test_a_receive_in_err_is_flushed_by_a_second_move(alice: rdmalab.Host) -> None:
    alice.run("""
with new() as qp:
    bring(qp, "ERR")
    time.sleep(0.3)  # the device has done its flushing
    said = post_recv(qp)
    alone = drain(rcq, 0.3)
    ask(qp, "ERR", ())
    again = drain(rcq, 1.0)
""")
    assert alice.get("said") == ""
    assert alice.get("alone") == [], f"gone: {DIFFERENCES['recv-in-err'].here}"
    assert alice.get("again") == [[1, "WR_FLUSH_ERR"]]


ACCEPTED = {
    "path_mtu": 0,
    "dest_qp_num": 1 << 24,
    "rq_psn": 1 << 24,
    "min_rnr_timer": 32,
    "sq_psn": 1 << 24,
    "retry_cnt": 8,
    "rnr_retry": 8,
}
REFUSED = {"path_mtu": 6, "timeout": 32, "max_rd_atomic": 200, "port_num": 2}


def test_some_values_out_of_range_are_taken(alice: rdmalab.Host) -> None:
    alice.put(values=[*ACCEPTED.items(), *REFUSED.items()])
    alice.run("""
checked = []
for field, value in values:
    with new() as qp:
        attr = attributes(qp)
        setattr(attr, field, value)
        said = ""
        for target in ("INIT", "RTR", "RTS"):
            said = said or ask(qp, target, qpstate.REQUIRED["RC"][target], attr)
        checked.append([field, value, said])
""")
    found = {(field, value): said for field, value, said in alice.get("checked")}
    for field, value in ACCEPTED.items():
        assert found[field, value] == "", (
            f"{field}={value} is refused now: {DIFFERENCES['values'].here}"
        )
    for field, value in REFUSED.items():
        assert found[field, value] == "EINVAL", f"{field}={value} is taken now"


def test_a_wrong_way_to_the_peer_is_refused_at_rtr(alice: rdmalab.Host) -> None:
    """B10, B12, B13: no GRH, a GID of the other family, an empty row, an address without a host."""
    alice.run("""
link_local = next(x.gid_index for x in ctx.query_gid_table(64) if x.gid_str().startswith("fe80"))
ways = {}
for name, gid, index in (
    ("right", None, None), ("link-local", None, link_local), ("empty row", None, 200),
    ("nobody", "0000:0000:0000:0000:0000:ffff:0a00:00c8", None), ("no GRH", None, None)):
    with new() as qp:
        bring(qp, "INIT")
        attr = attributes(qp, gid, index)
        if name == "no GRH":
            attr.ah_attr = AHAttr(is_global=0, port_num=here.port)
        begin = time.monotonic()
        said = ask(qp, "RTR", qpstate.REQUIRED["RC"]["RTR"], attr)
        ways[name] = [said, state(qp)[1], time.monotonic() - begin]
""")
    found = alice.get("ways")
    assert {name: said for name, (said, *_) in found.items()} == {
        "right": "",
        "link-local": "EINVAL",
        "empty row": "ENODATA",
        "nobody": "ETIMEDOUT",
        "no GRH": "EINVAL",
    }
    assert [shown for _, shown, _ in found.values()] == ["RTR", *["INIT"] * 4]
    assert found["nobody"][2] < 15  # the kernel asks by ARP, and gives up


def test_events_of_states_and_failures_of_unreliable_queue_pairs(alice: rdmalab.Host) -> None:
    """Three more points in which Soft-RoCE is not the specification's."""
    alice.run("""
events(0.0)
with new() as peer, new() as qp:
    bring(peer, "RTR", qp), bring(qp, "RTS", peer)
    post_recv(peer, 70), post_send(qp)
    first_packet = [drain(scq, 1.0), events(0.3)]
with new("UC") as peer, new("UC") as qp:
    bring(peer, "RTS", qp, "UC"), bring(qp, "RTS", peer, "UC")
    post_send(qp, lkey=1234)
    unreliable = [drain(scq, 1.0), state(qp)]
""")
    assert alice.get("first_packet") == [[[2, "SUCCESS"]], []], (
        f"{alice.get('first_packet')}; not so any more: {DIFFERENCES['comm-est'].here}"
    )
    assert alice.get("unreliable") == [[[2, "WR_FLUSH_ERR"]], ["ERR", "ERR"]], (
        f"{alice.get('unreliable')}; not so any more: {DIFFERENCES['sqe'].here}"
    )


def test_without_the_states_bit_attributes_are_not_checked(alice: rdmalab.Host) -> None:
    alice.run("""
with new() as qp:
    said = posted(lambda: qp.modify(attributes(qp), e.IBV_QP_TIMEOUT))
    with_bit = ask(qp, "RESET", ("TIMEOUT",))
""")
    assert alice.get("said") == "", f"not so any more: {DIFFERENCES['no-state-bit'].here}"
    assert alice.get("with_bit") == "EINVAL"


def test_reset_forgets_orders_and_leaves_completions(alice: rdmalab.Host) -> None:
    """Orders that are still in the queues vanish; completions already in the CQ stay there."""
    alice.run("""
with new() as peer, new() as qp:
    bring(peer, "RTS", qp), bring(qp, "RTS", peer)
    post_recv(qp, 10), post_recv(qp, 11)
    number = qp.qp_num
    ask(qp, "ERR", ())
    time.sleep(0.2)  # the two receives come back flushed, and nobody polls
    ask(qp, "RESET", ())
    for step in ("INIT", "RTR", "RTS"):
        assert not ask(qp, step, qpstate.REQUIRED["RC"][step], attributes(peer))
    again = [state(qp)[1], qp.qp_num == number]
    stale = drain(rcq)
    post_recv(qp, 12)
    ask(qp, "RESET", ())
    bring(qp, "ERR")
    vanished = drain(rcq, 0.3)
""")
    assert alice.get("again") == ["RTS", True]
    assert alice.get("stale") == [[10, "WR_FLUSH_ERR"], [11, "WR_FLUSH_ERR"]]
    assert alice.get("vanished") == []


def test_the_words_that_learners_read_are_there() -> None:
    for difference in DIFFERENCES.values():
        assert difference.specification != difference.here
    assert qpstate.attributes_in_words(REQUIRED["RC"]["RTR"]).count("\n") == 5
