"""What would crash libibverbs is an error in a host's kernel, and raw pyverbs stays what it was.

The witness for each guard is pyverbs without it: the same call, in a process of its own on the same
host, ends it with SIGSEGV.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

import rdmalab

from .endpoints import text_of, value

pytestmark = [pytest.mark.fabric, pytest.mark.timeout(300)]

SET_UP = """
import pyverbs.enums as e
from pyverbs.addr import AH, AHAttr, GID, GlobalRoute
from pyverbs.cq import CQ, CompChannel
from pyverbs.device import Context
from pyverbs.mr import MR, MW
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR
from rdmalab import here

ctx = Context(name=here.device)
pd, cq = PD(ctx), CQ(ctx, 16)
mr = MR(pd, 4096, e.IBV_ACCESS_LOCAL_WRITE)
piece = SGE(mr.buf, 8, mr.lkey)
send, receive = SendWR(num_sge=1, sg=[piece]), RecvWR(num_sge=1, sg=[piece])

def new_qp(kind=e.IBV_QPT_RC, **queues):
    queues = queues or {"scq": cq, "rcq": cq}
    return QP(pd, QPInitAttr(qp_type=kind, cap=QPCap(max_send_wr=4), sq_sig_all=0, **queues))

qp = new_qp()
"""


class Case(NamedTuple):
    code: str
    words: str  # what the guard says of it
    crashes: bool = True  # without the guard (else it reads or writes what it must not)


CASES = {
    "post_send on a closed QP": Case("qp.close()\nqp.post_send(send)", "queue pair (QP) is closed"),
    "post_recv on a closed QP": Case("qp.close()\nqp.post_recv(receive)", "(QP) is closed"),
    "a QP whose PD is closed": Case("pd.close()\nqp.post_send(send)", "(QP) is closed"),
    "a QP whose CQ is closed": Case("cq.close()\nqp.post_send(send)", "(QP) is closed"),
    "a QP after `with`": Case("with qp: pass\nqp.query(e.IBV_QP_STATE)", "(QP) is closed"),
    "poll of a closed CQ": Case("cq.close()\ncq.poll()", "completion queue (CQ) is closed"),
    "poll of a CQ after `with`": Case("with cq: pass\ncq.poll()", "(CQ) is closed"),
    "poll after ctx.close": Case("ctx.close()\ncq.poll()", "(CQ) is closed"),
    "printing a closed CQ": Case("cq.close()\nprint(cq)", "(CQ) is closed"),
    "query after ctx.close": Case("ctx.close()\nctx.query_port(1)", "device context (Context)"),
    "PD on a closed context": Case("ctx.close()\nPD(ctx)", "(Context) is closed"),
    "CQ on a closed context": Case("ctx.close()\nCQ(ctx, 4)", "(Context) is closed"),
    "MR on a closed PD": Case("pd.close()\nMR(pd, 64, 1)", "protection domain (PD) is closed"),
    "QP without scq": Case("new_qp(rcq=cq)", "has no scq"),
    "QP without rcq": Case("new_qp(scq=cq)", "has no rcq"),
    "QP on a closed CQ": Case(
        "dead = CQ(ctx, 4)\ndead.close()\nnew_qp(scq=dead, rcq=dead)", "(CQ) is closed"
    ),
    "UD send without an address": Case(
        "ud = new_qp(e.IBV_QPT_UD)\nud.to_rts(QPAttr(port_num=1))\nud.post_send(send)",
        "a datagram (UD) needs an address",
    ),
    "BIND_MW without a window": Case(
        "qp.post_send(SendWR(opcode=e.IBV_WR_BIND_MW))", "BIND_MW needs its window"
    ),
    "lkey of a closed MR": Case("mr.close()\nSGE(mr.buf, 8, mr.lkey)", "memory region (MR)"),
    "read far past the MR": Case("mr.read(64, 1 << 30)", "not in this memory region"),
    "write far past the MR": Case("mr.write(bytes(20 << 20), 20 << 20)", "of 4096 bytes"),
    "read just past the MR": Case("mr.read(4097, 0)", "bytes 0 to 4097", crashes=False),
    "read before the MR": Case("mr.read(8, -8)", "bytes -8 to 0", crashes=False),
    "write just past the MR": Case("mr.write(bytes(8), 8, 4089)", "4089 to 4097", crashes=False),
    "more than the data": Case("mr.write(b'abc', 8)", "only 3 bytes", crashes=False),
}

# Forks one child for each case, so that pyverbs is imported once; tells how each of them ended.
WITNESS = """
import json, os, resource
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
set_up, cases = json.loads(CASES)
exec(compile("import pyverbs.qp, pyverbs.addr, pyverbs.wr", "", "exec"))
ends = {}
for name, code in cases.items():
    child = os.fork()
    if child == 0:
        try:
            exec(set_up + code, {})
            os._exit(0)
        except BaseException:
            os._exit(1)
    ends[name] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(json.dumps(ends))
"""


@pytest.mark.parametrize("name", CASES)
def test_b16_what_would_crash_is_an_error_and_the_kernel_lives(
    shared_lab: rdmalab.Lab, name: str
) -> None:
    """B16: the kernel is the same one afterwards, with its variables, and verbs still work."""
    alice = shared_lab.alice
    alice.run(f"import os\nmark = os.getpid()\n{SET_UP}")
    text = text_of(alice, CASES[name].code, "WouldCrash")
    assert CASES[name].words in text
    assert value(alice, "os.getpid() == mark")
    alice.run(f"{SET_UP}\nmr.write(b'still', 5)\nstill = mr.read(5, 0)\nctx.close()")
    assert alice.get("still") == b"still"


@pytest.mark.long
def test_b16_without_the_guards_these_calls_crash(shared_lab: rdmalab.Lab) -> None:
    """The witness: each case that is said to crash ends a plain Python process with SIGSEGV."""
    cases = {name: case.code for name, case in CASES.items() if case.crashes}
    script = WITNESS.replace("CASES", repr(json.dumps([SET_UP, cases])), 1)
    out = b""
    argv = ["python3", "-c", f"import sys; sys.path.insert(0, '/opt/rdmalab')\n{script}"]
    for item in shared_lab.remote.stream("exec", argv, host="bob", timeout_s=120):
        if not isinstance(item, int):
            out += item[1]
    ends = json.loads(out.splitlines()[-1])
    assert {name for name, end in ends.items() if end != -11} == set(), ends


def test_the_guarded_classes_are_found_under_pyverbs_own_names(shared_lab: rdmalab.Lab) -> None:
    """Subclasses of the same name; ``raw`` gives what is below; type checks still hold."""
    shared_lab.alice.run(SET_UP)
    shared_lab.alice.run(
        "import pyverbs.qp\n"
        "from rdmalab.guards import raw\n"
        "facts = {\n"
        "    'name': QP.__name__, 'below': raw(QP).__module__, 'is': pyverbs.qp.QP is QP,\n"
        "    'mr': isinstance(mr, MR), 'cq': isinstance(cq, CQ) and type(cq) is CQ,\n"
        "    'raw': isinstance(qp, raw(QP)),\n"
        "}\n"
        "ctx.close()\n"
        "facts['closed'] = isinstance(qp, QP) and str(qp)\n"
        "qp.close()"
    )
    assert shared_lab.alice.get("facts") == {
        "name": "QP",
        "below": "pyverbs.qp",
        "is": True,
        "mr": True,
        "cq": True,
        "raw": True,
        "closed": "closed QP",
    }


def test_a_process_of_its_own_has_pyverbs_as_it_is(
    shared_lab: rdmalab.Lab, sh: Callable[..., Any]
) -> None:
    """Guards are in kernels only: what `rdmalab exec` starts (rdma-core's tests, say) is plain."""
    ran = sh(shared_lab, "alice", "python3 -c 'import pyverbs.qp as q; print(q.QP.__module__)'")
    assert ran.out.strip() == "pyverbs.qp"


def test_objects_come_and_go_as_without_guards(shared_lab: rdmalab.Lab) -> None:
    """Dropped, closed, or closed with their parents: the kernel holds none of them afterwards."""
    shared_lab.alice.run(
        SET_UP
        + textwrap.dedent(
            """
            import gc, os, subprocess, sys
            from rdmalab.guards import CLOSED_CQS
            del qp, send, receive, piece, mr, cq, pd, ctx
            kinds = [QP, MR, PD, Context]
            gc.collect()
            before = [sys.getrefcount(kind) for kind in kinds], len(CLOSED_CQS)
            def round_trip(close):
                ctx = Context(name=here.device)
                pd, cq = PD(ctx), CQ(ctx, 4)
                init = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=cq, rcq=cq, cap=QPCap())
                qp, mr = QP(pd, init), MR(pd, 64, 1)
                if close: ctx.close()
            for number in range(30): round_trip(number % 2)
            gc.collect()
            after = [sys.getrefcount(kind) for kind in kinds], len(CLOSED_CQS)
            """
        )
    )
    assert value(shared_lab.alice, "before == after"), value(shared_lab.alice, "[before, after]")


def test_what_the_collector_finds_is_closed_in_its_order(
    shared_lab: rdmalab.Lab, guest: Callable[..., Any]
) -> None:
    """Objects in a knot: raw pyverbs says `Bad file descriptor` on stderr, or worse."""
    alice = shared_lab.alice
    alice.restart()
    alice.run(SET_UP)
    alice.run(
        "import gc, sys\n"
        "knot = [ctx, pd, cq, mr, qp]\n"
        "knot.append(knot)\n"
        "del ctx, pd, cq, mr, qp, knot\n"
        "unraisable = []\n"
        "hook, sys.unraisablehook = sys.unraisablehook, unraisable.append\n"
        "gc.collect()\n"
        "sys.unraisablehook = hook\n"
        "complaints = len(unraisable)"
    )
    assert alice.get("complaints") == 0
    for kind in ("mr", "cq"):  # queue pairs: the kernel has one of its own there
        left = json.loads(guest(shared_lab, f"rdma -j resource show {kind}").out)
        assert [row for row in left if row["ifname"] == "rxe_alice" and "pid" in row] == []
