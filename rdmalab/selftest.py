"""``rdmalab selftest``: a rehearsal with hosts of its own, and one card for a bug report.

It boots its own lab, moves bytes with SEND and WRITE, loses packets and survives it, cleans up, and
leaves any lab that was running as it was.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from . import __version__, limits, qemu
from . import lab as labs
from .errors import RdmalabError
from .image import find_image
from .lab import Lab

__all__ = ["Card", "Step", "run"]

SIZES = (1, 1025, 65_536)  # bytes: less than, more than and many times a path MTU
HOST_CODE = '''
import os, time
import pyverbs.enums as e
from pyverbs.addr import AHAttr, GID, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR
from rdmalab import here

class End:
    """One end of an RC connection with one registered buffer."""
    def __init__(self, size):
        self.ctx = Context(name=here.device)
        self.pd, self.cq = PD(self.ctx), CQ(self.ctx, 16)
        access = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE
        self.mr = MR(self.pd, size, access)
        caps = QPCap(max_send_wr=8, max_recv_wr=8)
        init = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=caps)
        self.attr = QPAttr(port_num=1)
        self.attr.qp_access_flags = e.IBV_ACCESS_REMOTE_WRITE
        self.qp = QP(self.pd, init, self.attr)
        gid = self.ctx.query_gid(1, here.gid_index).gid
        self.card = {"qpn": self.qp.qp_num, "addr": self.mr.buf, "rkey": self.mr.rkey, "gid": gid}

    def connect(self, peer):
        self.peer = peer
        route = GlobalRoute(dgid=GID(peer["gid"]), sgid_index=here.gid_index)
        attr = self.attr
        attr.ah_attr = AHAttr(port_num=1, is_global=1, gr=route)
        attr.dest_qp_num, attr.path_mtu = peer["qpn"], e.IBV_MTU_1024
        attr.timeout, attr.retry_cnt, attr.rnr_retry, attr.min_rnr_timer = 14, 6, 6, 12
        attr.max_rd_atomic = attr.max_dest_rd_atomic = 1
        self.qp.to_rts(attr)

    def post_recv(self, size):
        self.qp.post_recv(RecvWR(sg=[SGE(self.mr.buf, size, self.mr.lkey)], num_sge=1))

    def post(self, opcode, data, offset=0):
        self.mr.write(data, len(data))
        sge = SGE(self.mr.buf, len(data), self.mr.lkey)
        wr = SendWR(opcode=opcode, num_sge=1, sg=[sge], send_flags=e.IBV_SEND_SIGNALED)
        if opcode == e.IBV_WR_RDMA_WRITE:
            wr.set_wr_rdma(self.peer["rkey"], self.peer["addr"] + offset)
        self.qp.post_send(wr)

    def poll(self, timeout_s=20):
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            count, found = self.cq.poll()
            if count:
                return found[0].status
            os.sched_yield()
        raise TimeoutError(f"no completion in {timeout_s} s")

end = End(1 << 16)
card = end.card
'''


LOSSY_CODE = """
statuses = set()
for i in range(80):
    place = i % 16 * 4096
    end.post(e.IBV_WR_RDMA_WRITE, data[place : place + 4096], place)
    statuses.add(end.poll())
statuses = sorted(statuses)
"""


@dataclass
class Step:
    """One thing that was tried: its name, how it ended, what was seen, how long it took (s)."""

    name: str
    passed: bool
    detail: str
    seconds: float


@dataclass
class Card:
    """The result of a rehearsal."""

    machine: dict[str, str]
    steps: list[Step] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether every step did."""
        return bool(self.steps) and all(step.passed for step in self.steps)

    def document(self) -> dict[str, Any]:
        """The card for ``--json``."""
        steps = [dict(step.__dict__) for step in self.steps]
        return {"passed": self.passed, "machine": self.machine, "steps": steps}

    def text(self) -> str:
        """The card for people and bug reports: 80 columns of plain text."""
        lines = [f"rdmalab selftest: {'PASSED' if self.passed else 'FAILED'}", ""]
        lines += [f"  {name:<9} {value}" for name, value in self.machine.items()]
        lines.append("")
        for step in self.steps:
            mark = "ok" if step.passed else "FAIL"
            lines.append(f"  {mark:<5} {step.seconds:6.2f} s  {step.name}: {step.detail}")
        return "\n".join(lines)


def machine_facts() -> dict[str, str]:
    """Versions of what counts; no name, user or path of this machine."""
    facts = {"rdmalab": __version__, "python": platform.python_version()}
    facts["machine"] = f"{platform.system()} {platform.release()}, {platform.machine()}"
    facts["cpus"] = str(min(qemu.CPUS, limits.processors()))
    try:
        facts["qemu"] = qemu.find_qemu().banner.removeprefix("QEMU emulator version ")
        image = find_image()
        if image is not None:
            facts["image"] = f"{image.id}, kernel {image.meta['kernel']}"
    except RdmalabError as error:
        facts["problem"] = str(error)
    return facts


def run(say: Callable[[str], None]) -> Card:
    """Rehearse; never raises for a step that fails, and always cleans up."""
    lab_id = f"selftest-{os.getpid()}"
    card = Card(machine_facts())
    opened: list[Lab] = []

    def boot() -> str:
        opened.append(labs.up(lab=lab_id, say=say))
        state = opened[0].state
        card.machine["accel"] = f"{state.accel} ({state.accel_why})"
        card.machine["backend"] = state.backend
        return "restored" if state.restored else "first start"

    plan: list[tuple[str, Callable[[], str]]] = [
        ("hosts up", boot),
        ("connect", lambda: connect(opened[0])),
        ("SEND", lambda: send(opened[0])),
        ("WRITE", lambda: write(opened[0])),
        ("WRITE at 5% loss", lambda: write_with_loss(opened[0])),
        ("host crash", lambda: crash(opened[0])),
        ("hosts down", lambda: clean_up(lab_id)),
    ]
    try:
        for name, action in plan:
            say(name)
            if not attempt(card, name, action) and name != "hosts down":
                break
    finally:
        labs.down(lab_id)
    return card


def attempt(card: Card, name: str, action: Callable[[], str]) -> bool:
    """Do one step and note on the card how it went."""
    begin = time.monotonic()
    try:
        detail, passed = action(), True
    except (RdmalabError, AssertionError) as error:
        detail, passed = str(error), False
    card.steps.append(Step(name, passed, detail, round(time.monotonic() - begin, 2)))
    return passed


def connect(lab: Lab) -> str:
    """Two RC queue pairs, one on each host, brought to RTS."""
    for host in lab.hosts:
        host.kernel.run(HOST_CODE)
    cards = {host.name: host.get("card") for host in lab.hosts}
    for host, peer in ((lab.alice, "bob"), (lab.bob, "alice")):
        host.put(peer=cards[peer])
        host.kernel.run("end.connect(peer)")
    return f"QP {cards['alice']['qpn']} on alice and QP {cards['bob']['qpn']} on bob are in RTS"


def exchange(lab: Lab, opcode: str, sizes: tuple[int, ...]) -> None:
    """Move random bytes from alice to bob; AssertionError unless the same arrive."""
    for size in sizes:
        data = os.urandom(size)
        lab.alice.put(data=data)
        if opcode == "SEND":
            lab.bob.kernel.run(f"end.post_recv({size})")
        lab.alice.kernel.run(f"end.post(e.IBV_WR_{opcode}, data); status = end.poll()")
        status = lab.alice.get("status")
        assert status == 0, f"alice's {opcode} of {size} bytes completed with status {status}"
        if opcode == "SEND":
            lab.bob.kernel.run("status = end.poll()")
            assert lab.bob.get("status") == 0, "bob's receive did not complete well"
        lab.bob.kernel.run(f"seen = end.mr.read({size}, 0)")
        assert lab.bob.get("seen") == data, f"{size} bytes of a {opcode} arrived changed"


def send(lab: Lab) -> str:
    """Two-sided: bob posts a receive for each message."""
    exchange(lab, "SEND", SIZES)
    return f"{', '.join(map(str, SIZES))} bytes from alice to bob, byte-equal"


def write(lab: Lab) -> str:
    """One-sided: bob's program does nothing."""
    exchange(lab, "RDMA_WRITE", SIZES)
    return f"{', '.join(map(str, SIZES))} bytes from alice to bob, byte-equal"


def write_with_loss(lab: Lab) -> str:
    """Packets are dropped on bob's link, and the data arrives all the same."""
    data = os.urandom(1 << 16)
    lab.alice.put(data=data)
    with lab.fault("bob", loss="5%"):
        lab.alice.kernel.run(LOSSY_CODE)
        lost = dropped(lab)
    lab.bob.kernel.run("seen = end.mr.read(1 << 16, 0)")
    assert lab.alice.get("statuses") == [0], "a WRITE completed with an error"
    assert lab.bob.get("seen") == data, "the bytes arrived changed"
    assert lost > 0, "no packet was dropped, so nothing was survived"
    return f"80 x 4096 bytes, byte-equal, with {lost} packets dropped on the way"


def dropped(lab: Lab) -> int:
    """Packets that the qdiscs on bob's link have dropped since the fault began."""
    total = 0
    for netns, device in ((None, "v-bob"), ("bob", "eth0")):
        shown = lab.remote.run("root", ["tc", "-s", "qdisc", "show", "dev", device], host=netns)
        words = shown.replace(",", " ").split()
        total += sum(int(words[i + 1]) for i, word in enumerate(words) if word == "(dropped")
    return total


def crash(lab: Lab) -> str:
    """A segmentation fault on alice; a fresh kernel answers."""
    try:
        lab.alice.kernel.run("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    except RdmalabError as error:
        assert "SIGSEGV" in str(error), f"the crash is reported as: {error}"
    lab.alice.kernel.run("x = 40 + 2")
    assert lab.alice.get("x") == 42, "alice's fresh kernel computes wrongly"
    return "alice's kernel crashed, was reported and replaced"


def clean_up(lab_id: str) -> str:
    """Stop the hosts; nothing of the lab is left."""
    labs.down(lab_id)
    left = [state.lab for state in labs.labs() if state.lab == lab_id]
    assert not left, f"{left} still runs"
    return "nothing is left"
