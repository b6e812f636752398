"""The judge on real hosts: hostile cells in a real kernel. The labs: tests/grading/test_labs.py.

Pains B45 (a check that did not run counts nothing) and B51 (code that replaces the checker).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import rdmalab
from rdmalab import lab as labs
from rdmalab.errors import BackendError, HostDied, HostError, HostTimeout, RemoteError
from rdmalab.grading.course import Course
from rdmalab.verdicts import Outcome

from ..hostile import CHECK, HOSTILE, NEEDS_IDLE, RIGHT, SAID, WRONG

pytestmark = [pytest.mark.fabric, pytest.mark.timeout(600)]

COURSE = Course(Path(__file__).parents[2] / "labs")
FORGED = """
kernel = get_ipython().kernel
def forged(stream, ident, parent):
    reply = {"ended": "ok", "why": "", "printed": "", "seal": "00"}
    kernel.session.send(stream, "rdmalab_check_reply", reply, parent, ident=ident)
kernel.shell_handlers["rdmalab_check_request"] = forged
"""
# What needs a kernel: name -> the cell that is run behind the wrong answer.
IN_A_KERNEL = {
    "get_ipython": "get_ipython = None",
    "json, which the kernel needs": "import json\njson.loads = json.dumps = lambda *a, **k: 7",
    "an AST transformer": "get_ipython().ast_transformers.append(None)",
    "an input transformer": "get_ipython().input_transformers_post.append(lambda lines: ['pass'])",
    "pre_run_cell": "get_ipython().events.register('pre_run_cell', lambda *a: 1 / 0)",
    "a memory file": "def double(x):\n    open('/proc/self/mem', 'rb')\n    return 6",
    "a child that reads the memory": "import os, subprocess\ndef double(x):\n"
    "    subprocess.check_output(['head', '-c1', f'/proc/{os.getpid()}/mem'])\n    return 6",
    "numbers of pyverbs": "import pyverbs.enums as e\ndouble = lambda x: e.IBV_WC_SUCCESS",
}


@pytest.fixture(scope="module")
def start_judged() -> Iterator[Callable[[], rdmalab.Lab]]:
    """Hosts with judges, started if they do not run: where there is a desk there are judges."""
    yield lambda: rdmalab.up(("alice", "bob"), lab="judged", desk=True)
    labs.down("judged")


@pytest.fixture
def lab(start_judged: Callable[[], rdmalab.Lab]) -> rdmalab.Lab:
    """Such hosts with fresh kernels."""
    lab = start_judged()
    for host in lab.hosts:
        host.restart()
    return lab


def try_to_run(kernel: rdmalab.kernels.HostKernel, cell: str) -> None:
    """Run a cell that may well break."""
    with contextlib.suppress(RemoteError):
        kernel.run(cell, timeout_s=30)


def one_case(kernel: rdmalab.kernels.HostKernel, name: str, cell: str) -> str:
    """Run a hostile cell and both checks; what is wrong with the outcomes, or nothing."""
    try_to_run(kernel, WRONG + cell)
    first = kernel.check(CHECK)
    try_to_run(kernel, RIGHT)
    second = kernel.check(CHECK)
    if first.ended == "ok" or not first.why:
        return f"{name}: {first}"
    if name in NEEDS_IDLE:
        assert second.ended == "refused"
        kernel.restart()
        kernel.guard()
        return ""
    return "" if second == Outcome("ok", "", SAID) else f"{name}: then {second}"


@pytest.mark.long
def test_hostile_cells_one_after_the_other_in_one_kernel(lab: rdmalab.Lab) -> None:
    """A wrong answer fails, whatever stands in the way, and the next right one passes."""
    kernel = lab.alice.kernel
    kernel.guard()
    wrong: list[str] = []
    for name, cell in {**HOSTILE, **IN_A_KERNEL}.items():
        try:
            wrong += filter(None, [one_case(kernel, name, cell)])
        except HostError as error:
            wrong.append(f"{name}: {error}")
            kernel.restart()
            kernel.guard()
    assert not wrong, "\n".join(wrong)


@pytest.mark.long
def test_a_kernel_that_cannot_answer_any_more_is_replaced(lab: rdmalab.Lab) -> None:
    """What a cell does to the kernel's own objects costs that kernel, and says so."""
    kernel = lab.alice.kernel
    kernel.guard()
    with pytest.raises(HostTimeout, match="has a fresh kernel"):
        kernel.run("get_ipython().kernel.session.send = None", timeout_s=5)
    assert kernel.check("#check\nassert 1").ended == "ok"


def test_a_lab_without_a_desk_has_no_judge(shared_lab: rdmalab.Lab) -> None:
    with pytest.raises(BackendError, match="only one with a desk has"):
        shared_lab.alice.kernel.check(CHECK)


def test_a_forged_reply_is_not_believed(lab: rdmalab.Lab) -> None:
    kernel = lab.alice.kernel
    kernel.guard()
    kernel.run(WRONG + FORGED)
    outcome = kernel.check(CHECK)
    assert outcome.ended == "refused" and "does not come from its judge" in outcome.why


VERBS = """#check
from rdmalab import here
from rdmalab.verbs import Endpoint
import pyverbs.enums as e
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.device import Context
with Context(name=here.device) as ctx, PD(ctx) as pd, MR(pd, 64, e.IBV_ACCESS_LOCAL_WRITE) as mr:
    mr.write(b"real", 4)
    assert mr.read(4, 0) == b"real" and mr.length == 64, "not the real memory region"
assert Endpoint.__init__.__module__ == "rdmalab.connection", Endpoint.__init__.__module__
with Endpoint() as end:
    assert end.state == "RESET", end.state
    assert end.mr.read(4, 0) == bytes(4)
"""
FAKES = """
import sys, types
import pyverbs.mr, pyverbs.enums, rdmalab.verbs, rdmalab.connection
class MR:
    length = 64
    def __init__(self, *a): pass
    def read(self, *a): return b"fake"
pyverbs.mr.MR = MR
pyverbs.enums.IBV_ACCESS_LOCAL_WRITE = 15
rdmalab.verbs.Endpoint.__init__ = lambda self, *a: None
rdmalab.verbs.Endpoint.state = "INIT"
rdmalab.connection.Context = rdmalab.verbs.Endpoint.__exit__ = None
sys.modules["rdmalab.verbs"] = types.ModuleType("rdmalab.verbs")
sys.modules["pyverbs.pd"] = None
"""


def test_verbs_are_the_real_ones(lab: rdmalab.Lab) -> None:
    kernel = lab.alice.kernel
    kernel.guard()
    try_to_run(kernel, FAKES)
    assert kernel.check(VERBS) == Outcome("ok")


def test_a_method_replaced_in_one_object_is_seen(lab: rdmalab.Lab) -> None:
    kernel = lab.alice.kernel
    kernel.guard()
    kernel.run("from rdmalab.verbs import Endpoint\nend = Endpoint()")
    look = "#check\nassert end.mr.read(4, 0) == b'note', 'no note'"
    assert kernel.check(look) == Outcome("raised", "no note")
    kernel.run("end.mr.read = lambda *a: b'note'")
    outcome = kernel.check(look)
    assert outcome.ended == "refused" and "`read`" in outcome.why


def test_an_endless_check_ends_and_the_next_one_is_judged(lab: rdmalab.Lab) -> None:
    kernel = lab.alice.kernel
    kernel.guard()
    kernel.run("def double(x):\n    while True: pass")
    with pytest.raises(HostTimeout):
        kernel.check(CHECK, timeout_s=3)
    kernel.run(RIGHT)
    assert kernel.check(CHECK) == Outcome("ok", "", SAID)


def test_a_check_that_swallows_interrupts_ends_with_its_kernel(lab: rdmalab.Lab) -> None:
    kernel = lab.alice.kernel
    kernel.guard()
    swallow = "def double(x):\n    while True:\n        try:\n            while True: pass\n"
    kernel.run(swallow + "        except BaseException: pass")
    with pytest.raises(HostTimeout, match="fresh kernel"):
        kernel.check(CHECK, timeout_s=3)
    kernel.guard()
    kernel.run(RIGHT)
    assert kernel.check(CHECK) == Outcome("ok", "", SAID)


def test_a_check_that_ends_the_kernel_has_no_verdict(lab: rdmalab.Lab) -> None:
    kernel = lab.alice.kernel
    kernel.guard()
    kernel.run("import os\ndef double(x): os._exit(0)")
    with pytest.raises(HostDied):
        kernel.check(CHECK)
    kernel.guard()
    kernel.run(RIGHT)
    assert kernel.check(CHECK) == Outcome("ok", "", SAID)
