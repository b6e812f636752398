"""Captures of a real wire: packets of each operation, refusals, repetitions; tshark as witness."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rdmalab
from rdmalab import lab as labs
from rdmalab.capture import Capture
from rdmalab.errors import BackendError, LabGone, MachineError, UsageError
from rdmalab.packets import PacketTable

from ..unit.tshark import assert_as_tshark

pytestmark = [pytest.mark.fabric, pytest.mark.timeout(200)]

SAMPLE = Path(__file__).parents[1] / "unit" / "roce.pcap"

# One end of a connection, in raw pyverbs. Path MTU 1024; the first PSN of each side is 1000. An
# acknowledgement may take a second (timeout 18) before anything is sent again, so that on a busy
# machine only those packets are repeated that a test wants to be.
END = """
import os, time
import pyverbs.enums as e
from pyverbs.addr import AH, GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR
from rdmalab import here

ctx = Context(name=here.device)
pd = PD(ctx)
cq = CQ(ctx, 128)
ALL = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ
ALL |= e.IBV_ACCESS_REMOTE_ATOMIC
mr = MR(pd, 1 << 18, ALL)
gid = str(ctx.query_gid(1, here.gid_index))

def make_card():
    return {"gid": gid, "qp_num": qp.qp_num, "address": mr.buf, "rkey": mr.rkey, "ud": ud.qp_num}

def make():
    global qp, ud, card
    while cq.poll(32)[0]: pass  # what is left of an earlier test
    cap = QPCap(64, 64, 1, 1)
    qp = QP(pd, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=cq, rcq=cq, cap=cap))
    ud = QP(pd, QPInitAttr(qp_type=e.IBV_QPT_UD, scq=cq, rcq=cq, cap=cap))
    card = make_card()

def route():
    way = GlobalRoute(dgid=GID(peer["gid"]), sgid_index=here.gid_index)
    return AHAttr(gr=way, is_global=1, port_num=1)

def connect(timeout=18):
    attr = QPAttr(port_num=1)
    attr.qp_access_flags = ALL
    attr.path_mtu = e.IBV_MTU_1024
    attr.dest_qp_num, attr.rq_psn, attr.sq_psn = peer["qp_num"], 1000, 1000
    attr.max_rd_atomic = attr.max_dest_rd_atomic = 16
    attr.ah_attr = route()
    attr.timeout, attr.retry_cnt = timeout, 6
    attr.min_rnr_timer, attr.rnr_retry = 18, 7  # until a receive is posted
    qp.to_rts(attr)
    plain = QPAttr(port_num=1)
    plain.qkey = 0x11111111
    ud.to_rts(plain)

def post_recv(length=8192, queue=None):
    (queue or qp).post_recv(RecvWR(num_sge=1, sg=[SGE(mr.buf + 131072, length, mr.lkey)]))

def post(operation, length=8, rkey=None, imm=None, **atomic):
    opcode = getattr(e, f"IBV_WR_{operation}")
    wr = SendWR(opcode=opcode, num_sge=1, sg=[SGE(mr.buf, length, mr.lkey)], imm_data=imm or 0)
    rkey = peer["rkey"] if rkey is None else rkey
    if atomic:
        wr.set_wr_atomic(rkey, peer["address"] + 4096, **atomic)
    elif "SEND" not in operation:
        wr.set_wr_rdma(rkey, peer["address"] + 4096)
    qp.post_send(wr)

def post_datagram(length):
    global way  # the address handle must live until the send is done
    wr = SendWR(num_sge=1, sg=[SGE(mr.buf, length, mr.lkey)])
    way = AH(pd, attr=route())
    wr.set_wr_ud(way, peer["ud"], 0x11111111)
    ud.post_send(wr)

def wait(count=1, seconds=20):
    end, found = time.monotonic() + seconds, []
    while len(found) < count:
        found += cq.poll(8)[1] or []
        assert time.monotonic() < end, found
        os.sched_yield()
    return [e.ibv_wc_status(wc.status).name.removeprefix("IBV_WC_") for wc in found]

def now(*order, **options):
    post(*order, **options)
    assert (status := wait()) == ["SUCCESS"], status
"""
READ_PSNS = [1000, 1001, 1002, 1003, 1004]


@pytest.fixture(scope="module")
def made(start_shared: Callable[[], rdmalab.Lab]) -> rdmalab.Lab:
    """alice and bob with the means to connect."""
    shared_lab = start_shared()
    for host in shared_lab.hosts:
        host.restart()
        host.run(END)
    return shared_lab


@pytest.fixture
def pair(made: rdmalab.Lab) -> rdmalab.Lab:
    """alice and bob, with a fresh pair of queue pairs for each test."""
    connect(made)
    return made


def connect(lab: rdmalab.Lab, **options: int) -> None:
    for host in lab.hosts:
        host.run("make()")
    for host, other in ((lab.alice, lab.bob), (lab.bob, lab.alice)):
        host.put(peer=other.get("card"))
        host.run(f"connect(**{options})")


def titles(table: PacketTable) -> list[str]:
    return [f"{packet.src}: {packet.title}" for packet in table]


# ---------------------------------------------------------------- what each operation is made of


def test_send_of_5000_bytes(pair: rdmalab.Lab) -> None:
    """At MTU 1024: First, three Middle, Last, and one acknowledgement, asked for by the last."""
    pair.bob.run("post_recv()")
    with pair.capture() as wire:
        pair.alice.run("now('SEND', 5000)")
    middle = ["alice: SEND MIDDLE"] * 3
    assert titles(wire.packets) == ["alice: SEND FIRST", *middle, "alice: SEND LAST", "bob: ACK"]
    sends, ack = wire.packets[:5], wire.packets[5]
    assert [packet.psn for packet in sends] == [1000, 1001, 1002, 1003, 1004]
    assert [packet.payload for packet in sends] == [1024] * 4 + [904]
    assert [packet.ack_request for packet in sends] == [False] * 4 + [True]
    assert {packet.qp for packet in sends} == {pair.bob.get("card")["qp_num"]}
    assert (ack.psn, ack.msn, ack.syndrome, ack.dst) == (1004, 1, "ACK", "alice")
    assert ack.qp == pair.alice.get("card")["qp_num"]
    assert wire.count(opcode="SEND_MIDDLE", src="alice") == 3
    assert wire.packets.notes == ()
    assert "SEND FIRST" in repr(wire.packets) and "SEND FIRST" in wire.ladder()._repr_svg_()


def test_times_are_those_of_the_hosts_clock(pair: rdmalab.Lab) -> None:
    """What a cell on a host notes with time.time() can be laid beside the packets."""
    with pair.capture("bob") as wire:
        pair.alice.run(
            "before = time.time(); now('RDMA_WRITE', 8); after = time.time()\n"
            "calls = [[here.name, 'post_send', before], [here.name, 'completion', after]]"
        )
    calls = pair.alice.get("calls")
    assert [calls[0][2] < packet.time_s < calls[1][2] for packet in wire.packets] == [True] * 2
    shown = str(wire.ladder(calls)).splitlines()
    shown = [line for line in shown if "later" not in line]
    assert [
        word in line
        for word, line in zip(
            ("post_send", "RDMA WRITE ONLY", "ACK", "completion"), shown[1:], strict=True
        )
    ] == [True] * 4


def test_write_with_immediate(pair: rdmalab.Lab) -> None:
    """The RETH is in the first packet only, the immediate in the last; pyverbs sends host order."""
    pair.bob.run("post_recv()")
    card = pair.bob.get("card")
    with pair.capture() as wire:
        pair.alice.run("now('RDMA_WRITE_WITH_IMM', 2001, imm=0xABCD)")
    first, last, ack = wire.packets
    assert (first.opcode, last.opcode) == ("RDMA_WRITE_FIRST", "RDMA_WRITE_LAST_WITH_IMMEDIATE")
    assert first.reth == (card["address"] + 4096, card["rkey"], 2001)
    assert first.imm is None and last.reth is None
    assert last.imm == int.from_bytes((0xABCD).to_bytes(4, sys.byteorder), "big")
    assert (first.payload, last.payload) == (1024, 977)
    assert ack.syndrome == "ACK"


def test_read_takes_a_packet_number_for_each_response(pair: rdmalab.Lab) -> None:
    with pair.capture() as wire:
        pair.alice.run("now('RDMA_READ', 5000); now('RDMA_READ', 8)")
    requests = wire.packets.where(opcode="RDMA_READ_REQUEST")
    assert [packet.psn for packet in requests] == [1000, 1005]
    assert [packet.reth.length for packet in requests if packet.reth] == [5000, 8]
    responses = wire.packets.where(src="bob")
    assert [packet.psn for packet in responses] == [*READ_PSNS, 1005]
    assert [packet.payload for packet in responses] == [1024] * 4 + [904, 8]
    assert [packet.msn for packet in responses] == [1, None, None, None, 1, 2]
    assert all(packet.is_response for packet in responses)


def test_atomics(pair: rdmalab.Lab) -> None:
    pair.bob.run("mr.write((37).to_bytes(8, 'little'), 8, 4096)")
    with pair.capture() as wire:
        pair.alice.run("now('ATOMIC_FETCH_AND_ADD', compare_add=5)")
        pair.alice.run("now('ATOMIC_CMP_AND_SWP', compare_add=42, swap=7)")
    add, first, swap, second = wire.packets
    assert (add.opcode, swap.opcode) == ("FETCH_ADD", "COMPARE_SWAP")
    assert add.atomic and add.atomic.swap_or_add == 5
    assert swap.atomic and (swap.atomic.compare, swap.atomic.swap_or_add) == (42, 7)
    assert first.opcode == second.opcode == "ATOMIC_ACKNOWLEDGE"
    assert (first.atomic_original, second.atomic_original) == (37, 42)


def test_a_wrong_key_is_refused(pair: rdmalab.Lab) -> None:
    with pair.capture() as wire:
        pair.alice.run("post('RDMA_WRITE', 8, rkey=peer['rkey'] ^ 1)")
        pair.alice.run("assert wait() == ['REM_ACCESS_ERR']")
    assert titles(wire.packets)[-1] == "bob: NAK: remote access error"
    assert wire.packets[-1].syndrome == "NAK: remote access error" and wire.packets[-1].is_nak


def test_no_receive_posted(pair: rdmalab.Lab) -> None:
    """RNR NAK with its timer (code 18: 5.12 ms), then the same SEND again, then its ACK."""
    with pair.capture("bob") as wire:
        pair.alice.run("post('SEND', 8)")
        end = time.monotonic() + 10
        while not wire.packets.where(syndrome="RNR NAK") and time.monotonic() < end:
            time.sleep(0.01)
        pair.bob.run("post_recv()")
        pair.alice.run("assert wait() == ['SUCCESS']")
    assert titles(wire.packets[:2]) == ["alice: SEND ONLY", "bob: RNR NAK"]
    assert wire.packets[1].rnr_timer_ms == 5.12
    assert [packet.again for packet in wire.packets[:2]] == [False, False]
    sent = wire.packets.where(opcode="SEND_ONLY")
    assert len(sent) >= 2 and all(packet.again for packet in sent[1:])
    assert titles(wire.packets)[-1] == "bob: ACK"


NFT = """table netdev lab {{ chain i {{ type filter hook ingress device v-alice priority 0;
udp dport 4791 @th,136,24 {psn} limit rate over 1/hour burst 1 packets accept;
udp dport 4791 @th,136,24 {psn} counter drop; }}; }}"""


def test_a_lost_packet_is_asked_for_and_sent_again(pair: rdmalab.Lab) -> None:
    """The second of three is lost behind alice's cable: a PSN sequence error, and it comes anew."""
    pair.remote.run("root", ["nft", NFT.format(psn=1001)])
    try:
        with pair.capture("alice") as wire:
            pair.alice.run("now('RDMA_WRITE', 3000)")
    finally:
        pair.remote.run("root", ["nft", "delete table netdev lab"])
    naks = wire.packets.where(syndrome="NAK: PSN sequence error")
    assert [packet.psn for packet in naks] == [1001]
    lost = wire.packets.where(psn=1001, src="alice")
    assert [packet.again for packet in lost] == [False, True]
    svg = wire.ladder()._repr_svg_()
    assert "again: RDMA WRITE MIDDLE" in svg and "NAK: PSN sequence error" in svg


def every_kind(lab: rdmalab.Lab) -> Capture:
    """A capture with all that can be had: operations, errors, a datagram, and junk to the port."""
    with lab.capture(max_packets=500) as wire:
        for length in (0, 1, 1024, 3001):
            lab.bob.run("post_recv()")
            lab.alice.run(f"now('SEND', {length}); now('RDMA_WRITE', {length})")
            lab.alice.run(f"now('RDMA_READ', {length})")
        lab.bob.run("post_recv(); post_recv()")
        lab.alice.run("now('SEND_WITH_IMM', 5, imm=1); now('RDMA_WRITE_WITH_IMM', 2, imm=2)")
        lab.alice.run("now('ATOMIC_FETCH_AND_ADD', compare_add=(1 << 63) + 1)")
        lab.alice.run("now('ATOMIC_CMP_AND_SWP', compare_add=3, swap=4)")
        lab.bob.run("post_recv(queue=ud)")
        lab.alice.run("post_datagram(77); assert wait() == ['SUCCESS']")
        lab.bob.run("print(wait(7))")
        lab.alice.run("post('SEND', 8)")
        lab.alice.run("time.sleep(0.01)")
        lab.bob.run("post_recv()")
        lab.alice.run("assert wait() == ['SUCCESS']")
        lab.alice.run("post('RDMA_READ', 8, rkey=1); assert wait() == ['REM_ACCESS_ERR']")
        lab.alice.run(
            "import socket\n"
            "with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as junk:\n"
            "    for size in (0, 1, 11, 12, 16, 40): junk.sendto(bytes(size), (peer_ip, 4791))"
        )
    return wire


def test_tshark_reads_the_same(pair: rdmalab.Lab, tmp_path: Path) -> None:
    """Opcodes, PSNs, QPs, syndromes and all headers, packet by packet."""
    pair.alice.put(peer_ip=pair.bob.ip)
    wire = every_kind(pair)
    file = wire.save(tmp_path / "wire.pcap")
    assert len(wire.packets) > 50
    kinds = {packet.opcode for packet in wire.packets}
    assert {"SEND_ONLY_WITH_IMMEDIATE", "RDMA_WRITE_ONLY_WITH_IMMEDIATE", "UNDECODED"} <= kinds
    assert_as_tshark(file, wire.packets)
    if "RDMALAB_WRITE_SAMPLE" in os.environ:  # how the unit tests' file is made
        shutil.copy(file, SAMPLE)


def test_a_cable_that_is_pulled_does_not_end_a_capture(pair: rdmalab.Lab) -> None:
    with pair.capture() as wire:
        with pair.fault("alice", down=True):
            time.sleep(0.2)
        pair.alice.run("now('RDMA_WRITE', 8)")
    assert titles(wire.packets.where(again=False)) == ["alice: RDMA WRITE ONLY", "bob: ACK"]
    assert wire.packets.notes == ()


def test_an_interface_that_is_switched_off_is_told(pair: rdmalab.Lab) -> None:
    """Either the capture goes on when it is back, or it says why it ended; it never just stops."""
    with pair.capture() as wire:
        pair.alice.run("now('RDMA_WRITE', 8)")
        for order in ("down", "up"):
            pair.remote.run("root", ["ip", "link", "set", "eth0", order], host="alice")
    assert wire.count(opcode="RDMA_WRITE_ONLY") == 1, "what had passed is kept"
    assert all("ended early" in note for note in wire.packets.notes)


# ---------------------------------------------------------------- begin, end, limits


@pytest.mark.parametrize(
    "times", [10, pytest.param(50, marks=[pytest.mark.long, pytest.mark.timeout(400)])]
)
def test_short_captures_lose_nothing(pair: rdmalab.Lab, times: int) -> None:
    """What passes right after the capture begins, and right before it ends, is in it."""
    lost = []
    for number in range(times):
        with pair.capture("bob" if number % 2 else "alice") as wire:
            pair.alice.run("now('RDMA_WRITE', 3000)")
        once = [packet for packet in wire.packets if not packet.again]  # a busy machine repeats
        seen = [packet.opcode.rpartition("_")[2] for packet in once]
        if seen != ["FIRST", "MIDDLE", "LAST", "ACKNOWLEDGE"]:
            lost.append((number, seen, wire.figures))
    assert not lost


def test_a_burst_is_whole(pair: rdmalab.Lab) -> None:
    """Two megabytes in 2048 packets, as fast as the device sends."""
    with pair.capture() as wire:
        pair.alice.run("for _ in range(16): post('RDMA_WRITE', 131072)\nassert len(wait(16)) == 16")
    assert wire.figures.dropped == 0
    sent = {packet.psn for packet in wire.packets.where(src="alice")}
    assert sent == set(range(1000, 1000 + 2048))
    assert "more packets are not shown" in repr(wire.packets)


def test_limits_are_told(pair: rdmalab.Lab) -> None:
    with pair.capture(max_packets=3, snaplen=64) as wire:
        pair.alice.run("now('RDMA_WRITE', 5000)")
    assert len(wire.packets) == 3
    ended, cut = wire.packets.notes
    assert "ended after 3 packets" in ended and "3 packets only the first 64 bytes" in cut
    assert [packet.payload for packet in wire.packets] == [1024] * 3, "from the header"
    for wrong in ({"max_packets": 0}, {"snaplen": 10}, {"max_packets": "9"}):
        with pytest.raises(UsageError):
            pair.capture(**wrong)
    with pytest.raises(UsageError, match="no host 'carol'"):
        pair.capture("carol")
    with pytest.raises(UsageError, match="runs once"), wire:
        pass


def leftovers(lab: rdmalab.Lab) -> str:
    return lab.remote.run("root", ["sh", "-c", "ps -eo pid,comm | grep tcpdump || true"])


def test_nothing_is_left_behind(pair: rdmalab.Lab) -> None:
    """After an error of the block, the stop button, and a controller that was killed."""
    with pytest.raises(ZeroDivisionError), pair.capture() as wire:
        pair.alice.run("now('RDMA_WRITE', 8)")
        _ = 1 / 0
    assert len(wire.packets) == 2, "what had passed is kept"
    with pytest.raises(KeyboardInterrupt), pair.capture() as wire:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        time.sleep(20)
    assert leftovers(pair) == ""
    assert not [t for t in threading.enumerate() if t.name.startswith("rdmalab-capture")]


def capture_command(*words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "rdmalab", "capture", *words, "--lab", "shared"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def begun(process: subprocess.Popen[bytes]) -> None:
    """Wait until a command says that it listens."""
    assert process.stderr is not None
    assert b"capturing RoCEv2 packets on alice's link" in process.stderr.readline()


def test_a_killed_controller_leaves_nothing(pair: rdmalab.Lab) -> None:
    process = capture_command()
    begun(process)
    process.kill()
    process.communicate(timeout=20)
    end = time.monotonic() + 10
    while leftovers(pair) and time.monotonic() < end:
        time.sleep(0.3)
    assert leftovers(pair) == ""


def test_a_lab_that_goes_away(new_lab: Any) -> None:
    """The capture says so, and what it had is kept."""
    lab = new_lab("alice", "bob")
    with pytest.raises(LabGone), lab.capture() as wire:
        labs.microvm.stop(lab.id)
    assert wire.packets == []
    assert any("broken off" in note for note in wire.packets.notes)
    with pytest.raises(BackendError), lab.capture():
        pass


# ---------------------------------------------------------------- rdmalab capture


def test_command_until_ctrl_c(pair: rdmalab.Lab, tmp_path: Path) -> None:
    """The table on stdout, the file beside it, exit 0."""
    file = tmp_path / "x.pcap"
    process = capture_command("alice", "-o", str(file))
    begun(process)
    pair.alice.run("now('RDMA_WRITE', 8)")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err.decode()
    lines = out.decode().splitlines()
    assert lines[0].split()[:4] == ["no.", "ms", "from", "to"]
    assert "RDMA WRITE ONLY" in lines[1] and "ACK" in lines[2]
    assert lines[3] == f"2 packets are in {file}."
    assert err == b""
    assert file.stat().st_size > 24


def test_command_as_json(pair: rdmalab.Lab) -> None:
    process = capture_command("bob", "--count", "2", "--seconds", "60", "--json")
    end = time.monotonic() + 30
    while process.poll() is None and time.monotonic() < end:
        pair.alice.run("now('RDMA_WRITE', 8)")
    out, err = process.communicate(timeout=30)
    document = json.loads(out)
    assert process.returncode == 0 and err == b""
    assert document["host"] == "bob" and len(document["packets"]) == 2
    write = next(p for p in document["packets"] if p["opcode"] == "RDMA_WRITE_ONLY")
    assert write["reth"]["length"] == 8 and write["src"] == "alice"


def test_command_without_packets_and_with_wrong_words(pair: rdmalab.Lab, tmp_path: Path) -> None:
    cases = [
        (["--seconds", "0.2"], 0, "No RoCEv2 packet was seen."),
        (["carol"], 2, "no host 'carol'"),
        (["--count", "0"], 2, "--count"),
        (["-o", str(tmp_path / "none" / "x.pcap")], 1, "cannot be written"),
    ]
    started = [capture_command(*words) for words, _, _ in cases]
    for process, (words, code, text) in zip(started, cases, strict=True):
        out, err = process.communicate(timeout=60)
        assert process.returncode == code, (words, err)
        assert text in (out if code == 0 else err).decode()
        assert b"Traceback" not in err


def test_a_file_that_cannot_be_written(pair: rdmalab.Lab, tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="cannot be written"):
        pair.capture().save(tmp_path)
