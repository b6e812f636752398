"""A host's kernel when things go wrong: it dies, hangs, floods, forks, fills; and what is left.

Learners' mistakes, not ours: each ends in one sentence that names the host, leaves the other host
as it was, and leaves this one usable. The witness is the guest, which sees all processes and all
RDMA resources.
"""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import pytest

import rdmalab
from rdmalab import lab as labs

pytestmark = [pytest.mark.fabric, pytest.mark.timeout(300)]

PATIENCE_S = 60  # for anything that should be over in a second or two on a quiet machine

VERBS = """
import os, time
from pyverbs.addr import AHAttr, GID, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import RecvWR, SGE, SendWR
import pyverbs.enums as e
from rdmalab import here

ctx = Context(name=here.device)
pd, cq = PD(ctx), CQ(ctx, 16)
mr = MR(pd, 4096, e.IBV_ACCESS_LOCAL_WRITE)

def new_qp():
    cap = QPCap(max_send_wr=4, max_recv_wr=4)
    return QP(pd, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=cq, rcq=cq, cap=cap))

def connect(qp, peer, rnr_retry):
    attr = QPAttr(qp_state=e.IBV_QPS_INIT, port_num=1)
    qp.modify(attr, e.IBV_QP_STATE | e.IBV_QP_PKEY_INDEX | e.IBV_QP_PORT | e.IBV_QP_ACCESS_FLAGS)
    attr = QPAttr(qp_state=e.IBV_QPS_RTR)
    attr.path_mtu, attr.dest_qp_num = e.IBV_MTU_1024, peer.qp_num
    attr.max_dest_rd_atomic, attr.min_rnr_timer = 1, 12
    route = GlobalRoute(dgid=GID(ctx.query_gid(1, here.gid_index).gid), sgid_index=here.gid_index)
    attr.ah_attr = AHAttr(port_num=1, is_global=1, gr=route)
    qp.modify(attr, e.IBV_QP_STATE | e.IBV_QP_AV | e.IBV_QP_PATH_MTU | e.IBV_QP_DEST_QPN
              | e.IBV_QP_RQ_PSN | e.IBV_QP_MAX_DEST_RD_ATOMIC | e.IBV_QP_MIN_RNR_TIMER)
    attr = QPAttr(qp_state=e.IBV_QPS_RTS)
    attr.timeout = 18  # 4.096 us * 2**18 = 1 s: a busy machine answers late
    attr.retry_cnt, attr.rnr_retry, attr.max_rd_atomic = 6, rnr_retry, 1
    qp.modify(attr, e.IBV_QP_STATE | e.IBV_QP_TIMEOUT | e.IBV_QP_RETRY_CNT | e.IBV_QP_RNR_RETRY
              | e.IBV_QP_SQ_PSN | e.IBV_QP_MAX_QP_RD_ATOMIC)
"""
STARTED = "open('/tmp/started', 'w').close()\n"


def value(host: rdmalab.Host, expression: str) -> Any:
    """What an expression is on a host."""
    host.run(f"_answer = {expression}")
    return host.get("_answer")


def text_of(messages: list[dict[str, Any]]) -> str:
    """The text of the streams among Jupyter messages."""
    return "".join(m["content"]["text"] for m in messages if m["msg_type"] == "stream")


def wait_until(what: Callable[[], Any], timeout_s: float = PATIENCE_S) -> Any:
    """The first true answer of ``what``; fails after a while."""
    end = time.monotonic() + timeout_s
    while not (answer := what()):
        assert time.monotonic() < end, f"still not so after {timeout_s} s"
        time.sleep(0.05)
    return answer


@pytest.fixture(scope="module")
def processes(guest: Callable) -> Callable[[rdmalab.Lab, str], list[str]]:
    """Command lines of learners' processes on a host, as the guest sees them."""

    def look(lab: rdmalab.Lab, host: str) -> list[str]:
        group = f"/sys/fs/cgroup/{host}/user"
        script = f"ps -o args= -p $(cat {group}/*/cgroup.procs | paste -sd, -)"
        return guest(lab, script).out.splitlines()

    return look


# ---------------------------------------------------------------- a kernel that dies

DEATHS = {
    "a queue pair without a receive CQ": (
        VERBS + "from rdmalab.guards import raw\n"  # pyverbs' own class, below the guarded one
        "raw(QP)(pd, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=cq, rcq=None, cap=QPCap()))",
        "crashed (SIGSEGV) inside a library",
    ),
    "SIGSEGV": ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "crashed (SIGSEGV)"),
    "SIGKILL": ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "was ended by SIGKILL"),
    "os._exit": ("import os; os._exit(3)", "ended by itself with exit code 3"),
    "memory": ("hog = []\nwhile True: hog.append(bytearray(1 << 20))", "ran out of memory"),
}


@pytest.mark.parametrize("cause", DEATHS)
def test_a_death_is_one_sentence_and_the_next_cell_works(
    shared_lab: rdmalab.Lab, cause: str
) -> None:
    """B16: what kills the process is an error here; bob's variables stay, alice runs on afresh."""
    code, words = DEATHS[cause]
    shared_lab.bob.run("x = 1")
    shared_lab.alice.run("mine = 2")
    with pytest.raises(rdmalab.HostDied) as caught:
        shared_lab.alice.run(code)
    said = str(caught.value)
    assert said.startswith("[alice] The kernel ") and words in said, said
    assert "A fresh one is running" in said and "\n" not in said
    assert caught.value._render_traceback_() == [f"HostDied: {said}"]
    assert value(shared_lab.bob, "x") == 1
    assert value(shared_lab.alice, "'mine' in globals()") is False


def test_a_death_between_two_cells_is_told_by_the_next(shared_lab: rdmalab.Lab) -> None:
    """B16: a thread that a cell has left behind kills the kernel: the next cell says so, once."""
    alice = shared_lab.alice
    alice.run("import os, threading; threading.Timer(0.2, os._exit, (7,)).start()")
    wait_until(lambda: shared_lab.remote.call("hello")["hosts"]["alice"] != "ready")
    wait_until(lambda: shared_lab.remote.call("hello")["hosts"]["alice"] == "ready")
    with pytest.raises(rdmalab.HostDied, match="exit code 7"):
        alice.run("print('a cell that knows nothing of it')")
    assert value(alice, "1 + 1") == 2


def test_exit_does_not_end_a_host(shared_lab: rdmalab.Lab) -> None:
    """``exit`` and ``sys.exit()`` are errors that say what does; the variables stay."""
    alice = shared_lab.alice
    alice.run("kept = 5")
    for code in ("exit", "quit()", "exit(3)"):
        with pytest.raises(rdmalab.RemoteError, match="restart"):
            alice.run(code)
    with pytest.raises(rdmalab.RemoteError) as caught:
        alice.run("import sys; sys.exit(3)")
    assert caught.value.ename == "SystemExit"
    assert alice.get("kept") == 5


def test_a_restart_frees_rdma_resources(lab: rdmalab.Lab, guest: Callable) -> None:
    """Queue pairs, regions, processes of the old kernel are gone; ``rdma resource`` is witness."""

    def held() -> dict[str, int]:
        listed = json.loads(guest(lab, "rdma -j resource show").out)
        return next(row for row in listed if row["ifname"] == "rxe_alice")

    empty = held()
    lab.alice.run(VERBS + "qps = [new_qp() for _ in range(10)]")
    lab.alice.run("import subprocess; subprocess.Popen(['sleep', '4322'], start_new_session=True)")
    number = value(lab.alice, "qps[3].qp_num")
    assert held()["qp"] == empty["qp"] + 10 and held()["mr"] == empty["mr"] + 1
    shown = guest(lab, "rdma -j resource show qp").out
    assert number in [qp["lqpn"] for qp in json.loads(shown) if qp["ifname"] == "rxe_alice"]
    lab.alice.restart()
    assert held() == empty
    assert "sleep 4322" not in guest(lab, "ps ax -o args").out


def test_down_ends_a_lab_whose_devices_are_in_use(new_lab: Callable) -> None:
    """B39: an open context and a registered region hold nothing up; the next start works."""
    lab = new_lab("alice", "bob")
    lab.alice.run(VERBS + "qp = new_qp()")
    job = lab.bob.start("import time\nwhile True: time.sleep(1)")
    pid = lab.state.pid
    assert labs.down(lab.id) is True
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie"
    with pytest.raises(rdmalab.RdmalabError):
        job.result(PATIENCE_S)
    with pytest.raises(rdmalab.RdmalabError):
        lab.alice.run("1")
    again = rdmalab.up(("alice", "bob"), lab=lab.id)
    again.alice.run(VERBS + "qp = new_qp()")


# ---------------------------------------------------------------- a cell that does not return


def test_a_cell_that_never_returns_is_ended_by_its_timeout(shared_lab: rdmalab.Lab) -> None:
    alice = shared_lab.alice
    alice.run("kept = 6")
    for code in ("import time; time.sleep(3600)", "while True: pass"):
        with pytest.raises(
            rdmalab.HostTimeout, match=r"\[alice\] did not finish within 1 s"
        ) as caught:
            alice.run(code, timeout_s=1)
        assert "--timeout" in str(caught.value) and "fresh kernel" not in str(caught.value)
        assert alice.get("kept") == 6


def test_polling_for_a_completion_that_never_comes(lab: rdmalab.Lab) -> None:
    """B18: SEND without a receive and rnr_retry=7, polled without a deadline. The timeout ends the
    cell; the queue pairs are as they were, and a receive still completes the very same SEND."""
    lab.alice.run(
        VERBS
        + """
a, b = new_qp(), new_qp()
connect(a, b, rnr_retry=7); connect(b, a, rnr_retry=7)
a.post_send(SendWR(wr_id=7, opcode=e.IBV_WR_SEND, num_sge=1, sg=[SGE(mr.buf, 64, mr.lkey)],
                   send_flags=e.IBV_SEND_SIGNALED))
"""
    )
    with pytest.raises(rdmalab.HostTimeout, match="a peer that has posted no receive"):
        lab.alice.run("while not cq.poll()[0]: pass", timeout_s=3)
    lab.alice.run("""
b.post_recv(RecvWR(wr_id=8, num_sge=1, sg=[SGE(mr.buf + 64, 64, mr.lkey)]))
done, end = {}, time.monotonic() + 30
while len(done) < 2 and time.monotonic() < end:
    for wc in cq.poll()[1]:
        done[wc.wr_id] = wc.status
    os.sched_yield()
""")
    assert value(lab.alice, "{str(k): v for k, v in done.items()}") == {"7": 0, "8": 0}


STUCK = {
    "sleep": "import time\nSTARTEDtime.sleep(3600)",
    "a blocked verbs call": VERBS + "STARTEDctx.get_async_event()",
    "polling": VERBS + "STARTEDwhile True: cq.poll()",
    "a child process": "import subprocess\nSTARTEDsubprocess.run(['sleep', '3600'])",
    "a lock": "import threading\nSTARTEDthreading.Event().wait()",
}


def interrupted(lab: rdmalab.Lab, sh: Callable, code: str) -> tuple[rdmalab.Job, float]:
    """Run a cell that does not return, interrupt it; the ended job, and how long that took."""
    sh(lab, "alice", "rm -f /tmp/started")
    job = lab.alice.start(code.replace("STARTED", STARTED))
    wait_until(lambda: sh(lab, "alice", "test -e /tmp/started").code == 0)
    begin = time.monotonic()
    lab.alice.interrupt()
    job.wait(PATIENCE_S)
    return job, time.monotonic() - begin


@pytest.mark.parametrize("kind", STUCK)
def test_an_interrupt_ends_what_blocks(
    shared_lab: rdmalab.Lab, sh: Callable, processes: Callable, kind: str
) -> None:
    """B56: a wait of an hour ends with KeyboardInterrupt; the kernel and its variables stay."""
    lab = shared_lab
    lab.alice.run("kept = 7")
    before = processes(lab, "alice")
    job, took_s = interrupted(lab, sh, STUCK[kind])
    print(f"{kind}: {took_s:.2f} s")
    with pytest.raises(rdmalab.RemoteError) as caught:
        job.result()
    assert caught.value.ename == "KeyboardInterrupt"
    assert lab.alice.get("kept") == 7
    assert processes(lab, "alice") == before


@pytest.mark.long
def test_ten_interrupts_in_a_row_leave_nothing(
    lab: rdmalab.Lab, sh: Callable, processes: Callable
) -> None:
    """B56: ten waits of an hour, ten interrupts, and the processes are those of the beginning."""
    lab.alice.run("count = 0")
    before = processes(lab, "alice")
    for _ in range(10):
        job = lab.alice.start("count += 1\nimport subprocess; subprocess.run(['sleep', '3600'])")
        wait_until(lambda: any("sleep" in line for line in processes(lab, "alice")))
        lab.alice.interrupt()
        job.wait(PATIENCE_S)
    assert lab.alice.get("count") == 10
    assert processes(lab, "alice") == before


def test_a_cell_that_refuses_interrupts_gets_its_host_a_fresh_kernel(
    shared_lab: rdmalab.Lab, sh: Callable, processes: Callable
) -> None:
    """B56: code that catches KeyboardInterrupt for ever; the timeout replaces the kernel."""
    code = "while True:\n    try:\n        while True: pass\n    except KeyboardInterrupt: pass"
    with pytest.raises(rdmalab.HostTimeout, match="it has a fresh kernel now"):
        shared_lab.alice.run(code, timeout_s=1)
    assert value(shared_lab.alice, "1 + 1") == 2
    assert len(processes(shared_lab, "alice")) == 1


def test_who_waits_for_a_cell_hears_of_a_restart(shared_lab: rdmalab.Lab) -> None:
    job = shared_lab.alice.start("import time; time.sleep(3600)")
    shared_lab.alice.restart()
    with pytest.raises(rdmalab.HostDied, match="was restarted while this ran"):
        job.result(PATIENCE_S)
    assert value(shared_lab.alice, "1 + 1") == 2


def test_a_busy_host_says_so(shared_lab: rdmalab.Lab) -> None:
    job = shared_lab.alice.start("import time; time.sleep(3600)")
    for ask in (lambda: shared_lab.alice.run("1", timeout_s=0.5), lambda: job.result(0.5)):
        with pytest.raises(rdmalab.HostError, match=r"\[alice\].*busy|still running") as caught:
            ask()
        assert "lab.alice.interrupt()" in str(caught.value)
    shared_lab.alice.interrupt()
    with pytest.raises(rdmalab.RemoteError):
        job.result(PATIENCE_S)


def test_a_host_at_work_for_another_notebook_is_waited_for_and_says_so(
    lab: rdmalab.Lab, sh: Callable
) -> None:
    """Also for the same notebook from before its restart: a learner's "Restart and Run All"."""
    sh(lab, "alice", "rm -f /tmp/started")
    job = lab.alice.start(f"import time\n{STARTED}time.sleep(10)\nslept = True")
    wait_until(lambda: sh(lab, "alice", "test -e /tmp/started").code == 0)
    other = labs.Lab(lab.state)
    try:
        with pytest.raises(rdmalab.HostError, match="at work for another notebook") as caught:
            other.alice.run("1", timeout_s=1)
        assert "lab.alice.interrupt()" in str(caught.value)
        other.alice.run("found = slept", timeout_s=PATIENCE_S)
        job.result(PATIENCE_S)
        assert other.alice.get("found") is True
    finally:
        other.close()


# ---------------------------------------------------------------- one host's excess


def assert_bob_is_well(lab: rdmalab.Lab, sh: Callable) -> None:
    assert lab.bob.get("x") == 1
    assert value(lab.bob, "x + 1") == 2
    assert sh(lab, "bob", "echo well").out == "well\n"


@pytest.mark.parametrize("bomb", ["bash -c ':() { : | : & }; :'", "python"])
def test_a_fork_bomb_stays_on_its_host(
    lab: rdmalab.Lab, sh: Callable, processes: Callable, bomb: str
) -> None:
    """Small processes meet the limit on their number, large ones that on memory."""
    lab.bob.run("x = 1")
    if bomb == "python":
        code = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    else:
        code = f"import os, time; os.system({bomb!r}); time.sleep(3600)"
    job = lab.alice.start(code)
    wait_until(lambda: len(processes(lab, "alice")) > 100 or job.done)
    assert_bob_is_well(lab, sh)
    assert "even here" in sh(lab, "alice", "echo even here").out
    lab.alice.restart()
    assert len(processes(lab, "alice")) == 1
    assert value(lab.alice, "1 + 1") == 2
    with pytest.raises(rdmalab.HostDied):
        job.result(PATIENCE_S)
    assert_bob_is_well(lab, sh)


def test_a_memory_hog_beside_the_kernel_dies_alone(lab: rdmalab.Lab, sh: Callable) -> None:
    lab.bob.run("x = 1")
    lab.alice.run("""
import subprocess, sys
kept = 8
hog = "data = []\\nwhile True: data.append(bytearray(1 << 20))"
code = subprocess.run([sys.executable, "-c", hog]).returncode
""")
    assert lab.alice.get("code") == -9 and lab.alice.get("kept") == 8
    assert_bob_is_well(lab, sh)


@pytest.mark.long
def test_verbs_objects_without_end_harm_their_own_host_only(lab: rdmalab.Lab, sh: Callable) -> None:
    """Completion queues are the kernel's memory, which no limit counts; alice pays for them."""
    lab.bob.run("x = 1")
    with pytest.raises(rdmalab.HostError) as caught:
        lab.alice.run(VERBS + "hog = []\nwhile True: hog.append(CQ(ctx, 32767))", timeout_s=120)
    assert "[alice]" in str(caught.value)
    assert_bob_is_well(lab, sh)
    assert value(lab.alice, "1 + 1") == 2


def test_what_ends_a_host_stays_in_memory(lab: rdmalab.Lab, guest: Callable) -> None:
    """The agent and each host's process 1 are locked in memory; what learners run is not."""
    locked = "for p in /proc/[0-9]*; do echo $(cat $p/comm; grep VmLck $p/status); done"
    kib = {"init": [], "kernel": []}
    agent = int(guest(lab, "grep VmLck /proc/1/status").out.split()[1])
    for name, *status in (line.split() for line in guest(lab, locked).out.splitlines()):
        if name in kib and status:
            kib[name].append(int(status[1]))
    assert agent > 0 and len(kib["init"]) == 2 and all(kib["init"]), (agent, kib)
    assert len(kib["kernel"]) == 2 and not any(kib["kernel"]), kib


def test_a_full_disk_on_a_host(lab: rdmalab.Lab, sh: Callable) -> None:
    """It is said to be full (not out of memory), and a fresh kernel can still tidy up."""
    lab.alice.run("""
import os
folders = ["/tmp", "/var/tmp", "/dev/shm", os.path.expanduser("~")]
errors = []
for folder in folders:
    try:
        with open(f"{folder}/big", "wb") as file:
            while True:
                file.write(bytes(1 << 20))
    except OSError as error:
        errors.append(error.errno)
""")
    assert lab.alice.get("errors") == [28] * 4  # ENOSPC
    lab.alice.restart()
    lab.alice.run("""
import os
for folder in ["/tmp", "/var/tmp", "/dev/shm", os.path.expanduser("~")]:
    os.remove(f"{folder}/big")
""")
    assert value(lab.bob, "1 + 1") == 2


def test_shared_memory_does_not_outlive_its_host(lab: rdmalab.Lab, sh: Callable) -> None:
    """System V segments have no owner once their processes are gone; a restart frees them."""
    lab.alice.run("import os; assert os.system('ipcmk -M 50000000 > /dev/null') == 0")
    lab.alice.restart()
    assert "0x" not in sh(lab, "alice", "ipcs -m").out


# ---------------------------------------------------------------- data both ways

PLAIN = [
    None,
    True,
    -1,
    2**70,
    1.5,
    "",
    "Zürich ⇄ 東京 \x00 \u2028",
    [],
    [1, [2, [3, None]]],
    {"a": {"b": [1.25, "c"]}},
    b"",
    b"\x00\xff",
]


def test_plain_data_travels_both_ways(shared_lab: rdmalab.Lab) -> None:
    for one in PLAIN:
        shared_lab.alice.put(there=one)
        back = shared_lab.alice.get("there")
        assert back == one and type(back) is type(one)
        assert (
            value(shared_lab.alice, f"there == {one!r} and type(there).__name__")
            == type(one).__name__
        )


def test_five_megabytes_travel_unchanged(shared_lab: rdmalab.Lab) -> None:
    data = np.random.default_rng(1).bytes(5_000_000)
    shared_lab.alice.put(data=data, view=memoryview(data)[:1000], changing=bytearray(data[:9]))
    assert shared_lab.alice.get("data") == data
    assert shared_lab.alice.get("view") == data[:1000]
    assert shared_lab.alice.get("changing") == data[:9]
    shared_lab.alice.run("import hashlib; digest = hashlib.sha256(data).hexdigest()")
    import hashlib

    assert shared_lab.alice.get("digest") == hashlib.sha256(data).hexdigest()


ARRAYS = [
    *(
        np.arange(6).astype(kind).reshape(2, 3)
        for kind in ("?", "b", "B", "<i2", ">i4", "<u8", "e", "f", "d")
    ),
    np.array([1 + 2j, 3], dtype="complex64"),
    np.array(["2026-11-29", "NaT"], dtype="datetime64[ms]"),
    np.array(["a", "ünï"]),
    np.array([b"ab", b"c"]),
    np.array(7.5),
    np.zeros((0, 3)),
    np.asfortranarray(np.arange(12).reshape(3, 4)),
    np.arange(20)[::3],
    np.arange(2**20, dtype="<f8"),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda a: f"{a.dtype}{list(a.shape)}")
def test_numpy_arrays_travel_both_ways(shared_lab: rdmalab.Lab, array: np.ndarray) -> None:
    shared_lab.bob.put(a=array)
    back = shared_lab.bob.get("a")
    np.testing.assert_array_equal(back, array)
    assert back.dtype == array.dtype and back.shape == array.shape and back.flags.writeable
    assert value(shared_lab.bob, "a.dtype.str") == array.dtype.str
    shared_lab.bob.run("total = float(a.size); a[...] = a")
    assert shared_lab.bob.get("total") == array.size


NOT_PLAIN = {
    "a set": "{1, 2}",
    "a function": "lambda: 1",
    "an object": "object()",
    "a module": "__import__('os')",
    "a dict with numbers for keys": "{1: 2}",
    "an array of objects": "__import__('numpy').array([object()])",
    "an array of records": "__import__('numpy').zeros(2, dtype=[('a', 'i4'), ('b', 'f8')])",
    "a list of bytes": "[b'x']",
}


@pytest.mark.parametrize("kind", NOT_PLAIN)
def test_what_is_no_plain_data_is_refused_in_clear_words(
    shared_lab: rdmalab.Lab, kind: str
) -> None:
    """Both ways a TypeError; nothing is set, nothing is changed on its way, the kernel lives on."""
    alice = shared_lab.alice
    alice.run("target = 'as before'")
    with pytest.raises(TypeError, match="do(es)? not travel"):
        alice.put(target=eval(NOT_PLAIN[kind]))
    assert alice.get("target") == "as before"
    alice.run(f"odd = {NOT_PLAIN[kind]}")
    with pytest.raises(rdmalab.RemoteError, match="odd: .* not travel") as caught:
        alice.get("odd")
    assert caught.value.ename == "TypeError" and caught.value.host == "alice"


def test_a_name_that_is_not_there(shared_lab: rdmalab.Lab) -> None:
    with pytest.raises(rdmalab.RemoteError, match=r"\[alice\] NameError: name 'nowhere'"):
        shared_lab.alice.get("nowhere")


# ---------------------------------------------------------------- errors, jobs, two at once


def test_an_error_carries_the_name_and_the_lines_of_the_host(shared_lab: rdmalab.Lab) -> None:
    with pytest.raises(rdmalab.RemoteError) as caught:
        shared_lab.alice.run("def half(n):\n    return n / 0\nhalf(3)")
    error = caught.value
    assert type(error).__name__ == "ZeroDivisionError" == error.ename
    assert error.host == "alice" and str(error) == "[alice] ZeroDivisionError: division by zero"
    lines = "\n".join(error._render_traceback_())
    assert lines.startswith("[alice] raised ZeroDivisionError")
    plain = re.sub(r"\x1b\[[0-9;]*m", "", lines)
    assert (
        "return n / 0" in plain
        and "half(3)" in plain
        and "ZeroDivisionError: division by zero" in plain
    )


@pytest.mark.parametrize(
    "code",
    [
        "x = = 1",
        "raise KeyboardInterrupt",
        "raise SystemExit('bye')",
        "class Odd(Exception): pass\nraise Odd('ü')",
        "assert False",
        "raise Exception",
        "import nosuchmodule",
    ],
)
def test_every_remote_error_is_raised_here(shared_lab: rdmalab.Lab, code: str) -> None:
    with pytest.raises(rdmalab.RemoteError) as caught:
        shared_lab.alice.run(code)
    assert str(caught.value).startswith("[alice] ")
    assert len(caught.value._render_traceback_()) > 1


def test_input_is_refused(shared_lab: rdmalab.Lab) -> None:
    with pytest.raises(rdmalab.RemoteError, match="does not work on alice; set the variable"):
        shared_lab.alice.run("name = input('Your name? ')")
    with pytest.raises(rdmalab.RemoteError, match="does not work on alice"):
        shared_lab.alice.run("import getpass; getpass.getpass()")


def test_a_jobs_output_and_error_come_with_its_result(
    shared_lab: rdmalab.Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    job = shared_lab.bob.start("print('first'); import sys; print('aside', file=sys.stderr); 1 / 0")
    job.wait(PATIENCE_S)
    assert capsys.readouterr().out == "" and job.done
    for _ in range(2):  # a second look shows the same
        with pytest.raises(rdmalab.RemoteError, match=r"\[bob\] ZeroDivisionError"):
            job.result()
        assert capsys.readouterr() == ("first\n[bob stderr] aside\n", "")


def test_output_streams_before_the_cell_ends(shared_lab: rdmalab.Lab) -> None:
    """A line is seen while its cell still waits for a file that only we can make."""
    seen: list[str] = []

    def on_output(message: dict[str, Any]) -> None:
        if message["msg_type"] == "stream":
            seen.append(message["content"]["text"])
            shared_lab.remote.run("exec", ["touch", "/tmp/go-on"], host="alice")

    code = "import os, time\nprint('waiting')\n"
    code += "while not os.path.exists('/tmp/go-on'): time.sleep(0.01)"
    shared_lab.alice.kernel.run(code, on_output=on_output)
    assert "".join(seen) == "waiting\n"
    shared_lab.remote.run("exec", ["rm", "/tmp/go-on"], host="alice")


def test_a_connection_that_is_closed_ends_what_waits_on_it(shared_lab: rdmalab.Lab) -> None:
    second = rdmalab.Lab(shared_lab.state)
    job = second.bob.start("import time; time.sleep(3600)")
    second.close()
    with pytest.raises(rdmalab.BackendError, match="closed"):
        job.result(PATIENCE_S)
    with pytest.raises(rdmalab.BackendError, match="closed"):
        second.bob.run("1")
    shared_lab.bob.interrupt()
    assert value(shared_lab.bob, "1 + 1") == 2


def test_an_error_of_the_receiver_stops_the_cell(shared_lab: rdmalab.Lab) -> None:
    """Whoever cannot take the output (a closed pipe, say) leaves no cell running behind."""

    def broken(message: dict[str, Any]) -> None:
        raise BrokenPipeError

    shared_lab.alice.run("kept = 10")
    with pytest.raises(BrokenPipeError):
        shared_lab.alice.kernel.run("print(1)\nwhile True: pass", on_output=broken)
    assert shared_lab.alice.get("kept") == 10


def test_two_hosts_really_run_at_once(shared_lab: rdmalab.Lab) -> None:
    """Each waits for the other: alice accepts what bob connects, and both would wait for ever."""
    accept = "import socket; s = socket.create_server(('10.0.0.1', 5000)); c, _ = s.accept()\n"
    accept += "got = c.recv(9)"
    connect = """
import socket, time
end = time.monotonic() + 60
while True:
    try:
        c = socket.create_connection(("10.0.0.1", 5000))
        break
    except ConnectionRefusedError:
        assert time.monotonic() < end
        time.sleep(0.02)
c.sendall(b"met"); c.close()
"""
    jobs = [shared_lab.alice.start(accept), shared_lab.bob.start(connect)]
    for job in jobs:
        job.result(PATIENCE_S)
    assert shared_lab.alice.get("got") == b"met"
    shared_lab.alice.run("c.close(); s.close()")


def test_every_line_of_a_flood_of_small_messages_arrives(lab: rdmalab.Lab) -> None:
    """Flushed one by one, 300 lines are as many messages; none is lost, and the end is seen."""
    seen: list[dict[str, Any]] = []
    code = "for i in range(300): print(i, flush=True)"
    lab.alice.kernel.run(code, timeout_s=200, on_output=seen.append)
    assert text_of(seen).split() == list(map(str, range(300)))


def test_two_processes_on_one_host_take_turns(
    shared_lab: rdmalab.Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second connection, as of another notebook, gets its own output; the first one's error
    does not cancel what the second has asked for."""
    second = rdmalab.Lab(shared_lab.state)
    try:
        seen: list[dict[str, Any]] = []
        job = shared_lab.alice.start("import time; time.sleep(0.5); print('mine'); 1 / 0")
        second.alice.kernel.run("print('theirs')", on_output=seen.append)
        with pytest.raises(rdmalab.RemoteError, match="ZeroDivisionError"):
            job.result(PATIENCE_S)
        assert (capsys.readouterr().out, text_of(seen)) == ("mine\n", "theirs\n")
    finally:
        second.close()
        second.close()


def test_numbers_of_jobs_do_not_pile_up_threads(shared_lab: rdmalab.Lab) -> None:
    before = psutil.Process().num_threads()
    for number, host in itertools.product(range(5), shared_lab.hosts):
        host.start(f"n = {number}").result(PATIENCE_S)
    assert psutil.Process().num_threads() <= before + 1
