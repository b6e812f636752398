"""Lab 01 on real hosts: what it claims holds, right answers pass, wrong ones are told why."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from nbformat import NotebookNode

import rdmalab

from .learner import (
    Attempt,
    Retries,
    assert_runs_again,
    assert_untouched,
    errors,
    full_marks,
    judge,
    judge_retries,
    marks,
    printed,
    retries,
    run,
    solved,
    untouched,
)

pytestmark = [pytest.mark.labs, pytest.mark.timeout(1200)]

NAME = "01_register_memory"


# ---------------------------------------------------------------- answers

PAGES = "return (address + length - 1) // PAGE - address // PAGE + 1"
FIND = 'for line in status.splitlines():\n    if line.startswith("{}:"):\n        return {}'
NUMBER = "int(line.split()[1])"
EVERYTHING = "LOCAL | WRITE | READ | ATOMIC"
RIGHT_FLAGS = {
    "send": "NONE",
    "receive": "LOCAL",
    "mailbox": "LOCAL | WRITE",
    "catalogue": "READ",
    "answers": "LOCAL",
    "counter": "LOCAL | ATOMIC",
}


def flags(**changed: str) -> str:
    """The lines of an answer to task 2: the right one, with some purposes changed."""
    chosen = RIGHT_FLAGS | changed
    return "\n".join(f'rights["{purpose}"] = {right}' for purpose, right in chosen.items())


LEAST_WAITS = {"flags-least": "First make all six work"}
NO_NOTICE = {"notice-write": "As long as nobody can read", "notice-count": "First make the notice"}
BOARD = "board.write(text, len(text))\nnotice = [board.buf, board.rkey]"

TRIES = [
    Attempt(
        "pinned",
        "kB taken for bytes",
        [FIND.format("VmPin", NUMBER), PAGES],
        {"pinned-bytes": "Look at the unit"},
    ),
    Attempt(
        "pinned",
        "locked memory (VmLck) instead of pinned",
        [FIND.format("VmLck", f"{NUMBER} * 1024"), PAGES],
        {"pinned-bytes": "It should have grown by 3 pages"},
    ),
    Attempt(
        "pinned",
        "length rounded up to pages, wherever it begins",
        [FIND.format("VmPin", f"{NUMBER} * 1024"), "return -(-length // PAGE)"],
        {"pinned-pages": "where does the first byte lie"},
    ),
    Attempt(
        "pinned",
        "right, with a regular expression and a set of pages",
        [
            'import re\nreturn int(re.search(r"VmPin:\\s*(\\d+)", status)[1]) << 10',
            "return len(range(address - address % PAGE, address + length, PAGE))",
        ],
    ),
    Attempt(
        "flags",
        "every right for everything",
        f"rights = dict.fromkeys(PURPOSES, {EVERYTHING})",
        {"flags-least": "A right that nobody needs"},
    ),
    Attempt(
        "flags",
        "remote write and atomic without local write",
        flags(mailbox="WRITE", counter="ATOMIC"),
        {"flags-enough": "does not work: mailbox, counter", **LEAST_WAITS},
    ),
    Attempt(
        "flags",
        "own READ taken for reading",
        flags(answers="READ"),
        {"flags-enough": "does not work: answers", **LEAST_WAITS},
    ),
    Attempt(
        "flags",
        "right, as one table with pyverbs' own names",
        "rights = dict(send=0, catalogue=e.IBV_ACCESS_REMOTE_READ)\n"
        'rights["receive"] = rights["answers"] = e.IBV_ACCESS_LOCAL_WRITE\n'
        "for purpose, flag in zip(('mailbox', 'counter'), (WRITE, ATOMIC)):\n"
        "    rights[purpose] = LOCAL + flag",
    ),
    Attempt(
        "pool",
        "a registration for each take",
        [
            "self.pd, self.size, self.left = pd, size, list(range(count))",
            "if self.left:\n    self.mr = MR(self.pd, self.size, LOCAL)\n"
            "    return self.left.pop() * self.size",
            "self.left.append(offset // self.size)",
        ],
        {
            "pool-once": "One region for the whole pool",
            "pool-slots": "The region should have just count * size bytes",
        },
    ),
    Attempt(
        "pool",
        "a region for each slot",
        [
            "self.regions = [MR(pd, size, LOCAL) for _ in range(count)]\n"
            "self.mr, self.free = self.regions[0], list(range(0, count * size, size))",
            "return self.free.pop() if self.free else None",
            "self.free.append(offset)",
        ],
        {
            "pool-once": "One region for the whole pool",
            "pool-slots": "The region should have just count * size bytes",
        },
    ),
    Attempt(
        "pool",
        "slots are never used again",
        [
            "self.mr, self.next, self.size = MR(pd, count * size, LOCAL), 0, size",
            "if self.next < self.mr.length:\n    self.next += self.size\n"
            "    return self.next - self.size",
            "return",
        ],
        {
            "pool-once": "A slot that was given back",
            "pool-slots": "Just the slot that was given back",
        },
    ),
    Attempt(
        "pool",
        "right, with memory of its own and a set of slots that are taken",
        [
            "self.memory = allocate(count * size)\n"
            "self.mr = MR(pd, count * size, LOCAL, address_of(self.memory))\n"
            "self.slots, self.taken = range(0, count * size, size), set()",
            "for offset in self.slots:\n    if offset not in self.taken:\n"
            "        self.taken.add(offset)\n        return offset\nreturn None",
            "self.taken.discard(offset)",
        ],
    ),
    Attempt(
        "notice",
        "all rights, to be on the safe side",
        f"board = MR(desk.pd, 64, {EVERYTHING})\n{BOARD}",
        {
            "notice-write": "Bob's device should have refused",
            "notice-count": "WRITE is not the only operation",
        },
    ),
    Attempt(
        "notice",
        "LOCAL, because bob writes into it",
        f"board = MR(desk.pd, 64, LOCAL)\n{BOARD}",
        {"notice-read": "Alice could not read", **NO_NOTICE},
    ),
    Attempt(
        "notice",
        "in a domain of its own",
        f"from pyverbs.pd import PD\nother = PD(desk.ctx)\nboard = MR(other, 64, READ)\n{BOARD}",
        {"notice-read": "Alice could not read", **NO_NOTICE},
    ),
    Attempt(
        "notice",
        "right, over memory of bob's own that is written first",
        "paper = allocate(PAGE)\npaper[: len(text)] = text\n"
        "board = MR(desk.pd, 64, e.IBV_ACCESS_REMOTE_READ, address_of(paper))\n"
        "notice = (address_of(paper), board.rkey)",
    ),
    Attempt(
        "pinned",
        "kB taken for 1000 bytes",
        [FIND.format("VmPin", f"{NUMBER} * 1000"), PAGES],
        {"pinned-bytes": "Look at the unit"},
    ),
    Attempt(
        "pinned",
        "text instead of a number",
        [FIND.format("VmPin", "line.split()[1]"), PAGES],
        {"pinned-bytes": "A number of bytes was expected"},
    ),
    Attempt(
        "pinned",
        "the byte behind the end counted, too",
        [
            FIND.format("VmPin", f"{NUMBER} * 1024"),
            "return (address + length) // PAGE - address // PAGE + 1",
        ],
        {"pinned-pages": "where does the first byte lie"},
    ),
    Attempt(
        "flags",
        "nothing for a receive buffer",
        flags(receive="NONE"),
        {"flags-enough": "does not work: receive", **LEAST_WAITS},
    ),
    Attempt(
        "flags",
        "remote read for what is only sent, and local write where only peers read",
        flags(send="READ", catalogue="LOCAL | READ"),
        {"flags-least": "A right that nobody needs"},
    ),
    Attempt(
        "flags",
        "names instead of flags",
        'rights = {purpose: "LOCAL" for purpose in PURPOSES}',
        {"flags-enough": "does not work: send", **LEAST_WAITS},
    ),
    Attempt(
        "pool",
        "numbers of slots instead of offsets",
        [
            "self.mr, self.free = MR(pd, count * size, LOCAL), list(range(count))",
            "return self.free.pop() if self.free else None",
            "self.free.append(offset)",
        ],
        {"pool-slots": "Slots overlap"},
    ),
    Attempt(
        "pool",
        "an exception when all are taken",
        [
            "self.mr = MR(pd, count * size, LOCAL)\nself.free = list(range(0, count * size, size))",
            "return self.free.pop()",
            "self.free.append(offset)",
        ],
        {"pool-slots": "Eight offsets were expected, and then None"},
    ),
    Attempt(
        "pool",
        "give() frees everything",
        [
            "self.mr, self.count, self.size = MR(pd, count * size, LOCAL), count, size\n"
            "self.free = list(range(0, count * size, size))",
            "return self.free.pop() if self.free else None",
            "self.free = list(range(0, self.count * self.size, self.size))",
        ],
        {"pool-slots": "Just the slot that was given back"},
    ),
    Attempt(
        "notice",
        "WRITE forbidden, atomics forgotten",
        f"board = MR(desk.pd, 64, LOCAL | READ | ATOMIC)\n{BOARD}",
        {"notice-count": "WRITE is not the only operation"},
    ),
    Attempt(
        "notice",
        "put up, but nothing written on it",
        "board = MR(desk.pd, 64, READ)\nnotice = [board.buf, board.rkey]",
        {"notice-read": "the text is not there", **NO_NOTICE},
    ),
    Attempt(
        "notice",
        "only the key is told",
        "board = MR(desk.pd, 64, READ)\nboard.write(text, len(text))\nnotice = board.rkey",
        {"notice-read": "should be [address, key]", **NO_NOTICE},
    ),
]


def test_after_all_attempts_the_solution_still_passes(done: NotebookNode) -> None:
    assert errors(done) == {}
    assert marks(done) == full_marks(NAME)
    assert sum(full_marks(NAME).values()) == 15
    assert printed(done, stream="stderr") == ""


NO_RIGHT = Attempt(
    "notice",
    "no right at all",
    f"board = MR(desk.pd, 64, NONE)\n{BOARD}",
    {"notice-read": "Alice could not read", **NO_NOTICE},
)
ON_PAPER = next(attempt for attempt in TRIES if attempt.title.startswith("right, over memory"))
RETRIES = [*retries(TRIES), Retries((NO_RIGHT, ON_PAPER, ON_PAPER))]


@pytest.mark.long
@pytest.mark.parametrize("attempt", RETRIES, ids=str)
def test_a_second_try_is_not_judged_by_what_the_first_has_left(
    attempt: Retries, tried: dict[str, NotebookNode]
) -> None:
    judge_retries(attempt, tried)


@pytest.mark.long
@pytest.mark.parametrize("attempt", TRIES, ids=str)
def test_an_answer_is_told_what_is_wrong_with_it(
    attempt: Attempt, tried: dict[str, NotebookNode]
) -> None:
    judge(attempt, tried[str(attempt)])


@pytest.mark.long
def test_the_untouched_lab_fails_in_its_checks_only(done: NotebookNode, tmp_path: Path) -> None:
    """On hosts that have seen a solved one: no mark is left from there."""
    empty = run(untouched(NAME), tmp_path)
    assert_untouched(NAME, empty)
    assert "Come back here after Task 3" in printed(empty)


# ---------------------------------------------------------------- what the lab claims


def test_pages_come_with_the_registration_and_vmpin_counts_each_of_them(done: NotebookNode) -> None:
    text = printed(done)
    assert re.findall(r"(?:allocated|touched|registered): +(\d+)", text) == ["0", "3", "256"]
    found = re.findall(r"VmPin:\s+(\d+) kB", text)
    assert found == ["0", "1024", "2048", "1024", "0"]


def test_each_registration_has_a_key_of_its_own(done: NotebookNode) -> None:
    """The row of the table in the upper 24 bits; Soft-RoCE's lkey and rkey are equal."""
    keys = re.findall(r"lkey (0x[0-9a-f]{8}), rkey (0x[0-9a-f]{8})", printed(done))
    assert len(keys) == 4 and all(lkey == rkey for lkey, rkey in keys)
    rows = [int(lkey, 16) >> 8 for lkey, _ in keys]
    assert len(set(rows)) == 4 and 0 not in rows


def test_sixteen_combinations_of_rights_are_answered_as_the_manual_says(
    done: NotebookNode,
) -> None:
    """B23: remote write and atomic need local write. The oracle is ibv_reg_mr(3), not our rule."""
    rows = re.findall(r"^ +(yes|-) +(yes|-) +(yes|-) +(yes|-) +(ok|EINVAL)$", printed(done), re.M)
    assert len(set(rows)) == 16
    for local, write, _read, atomic, answer in rows:
        wants = "EINVAL" if "yes" in (write, atomic) and local == "-" else "ok"
        assert answer == wants


def test_b04_the_limit_for_pinned_memory_is_met_and_told_in_numbers(done: NotebookNode) -> None:
    """B04: ENOMEM from reg_mr, with what was asked, what is pinned and what is allowed."""
    text = printed(done)
    assert "limit: 67108864 bytes, that is 64 MiB" in text
    found = re.findall(r"(\d+) KiB asked, +(\d+) KiB pinned before: (ok|ENOMEM)", text)
    assert found == [
        ("40960", "0", "ok"),
        ("40960", "40960", "ENOMEM"),
        ("66560", "0", "ENOMEM"),
        ("16", "0", "ok"),
        ("1024", "0", "ENOMEM"),
    ]
    assert "pages of `big` that exist: 10240 of 16640" in text
    (said,) = re.findall(r"^1 MiB could not be registered: ENOMEM.*\n.*$", text, re.M)
    assert "memlock limit of this process is 64 KiB" in said


def test_the_price_has_the_shape_that_the_text_tells(done: NotebookNode) -> None:
    """Ratios within one run, with room: 16 pages are not 8 times one, a copy of 4 KiB is cheap."""
    lines = {
        name.strip(): [float(number) for number in numbers.split()]
        for name, numbers in re.findall(
            r"^(register|register, .+? pages|copy instead) +((?:\d+ +){6}\d+)$", printed(done), re.M
        )
    }
    small, huge = lines["register"], lines["register, 2 MiB pages"]
    assert small[2] < 8 * small[0]
    assert huge[-1] < small[-1]
    assert lines["copy instead"][0] * 2 < small[0]
    assert lines["copy instead"][-1] > small[-1]
    assert lines["register, new pages"][-1] > small[-1]
    assert "with two regions more: 2" in printed(done)


def test_b23_each_side_hears_what_the_lab_says(done: NotebookNode) -> None:
    """B23: the requester's status, the responder's queue pair, its receive and its bytes."""
    rows = {
        case: answer.split(None, 3)
        for case, answer in re.findall(
            r"^(\S.+?) {2,}(\S+ +(?:RTS|ERR) +(?:waits|flushed) +\S.+)$", printed(done), re.M
        )
    }
    refused = ["REM_ACCESS_ERR", "ERR", "flushed", "as before"]
    assert rows.pop("region taken back") == [*refused[:3], "gone"]
    assert rows.pop("queue pair without WRITE") == ["REM_INV_REQ_ERR", *refused[1:]]
    for case in ("all in order", "fetch-and-add, all in order"):
        assert rows.pop(case) == ["SUCCESS", "RTS", "waits", "changed"]
    silent = ["RTS", "waits", "as before"]
    assert rows.pop("no bytes at all, nonsense rkey") == ["SUCCESS", *silent]
    status, *rest = rows.pop("wrong lkey")  # the specification says LOC_PROT_ERR
    assert status in ("WR_FLUSH_ERR", "LOC_PROT_ERR") and rest == silent
    assert rows.pop("READ into a region without LOCAL") == ["LOC_PROT_ERR", *silent]
    assert len(rows) == 5 and all(answer == refused for answer in rows.values()), rows
    assert "alice got the old value: 37" in printed(done)
    assert "bob has the new one: 42" in printed(done)


def test_b22_the_guards_stand_at_both_edges(done: NotebookNode, hosts: str) -> None:
    """B22: no byte beside the region changed, also when address + length wraps; no kernel bug."""
    text = printed(done)
    assert "states: ['RTS', 'ERR', 'ERR', 'ERR', 'ERR']" in text
    assert "the last byte of the region between its neighbours: ee aa ee" in text
    assert "bytes that changed: 1" in text
    assert not re.search(r"BUG|Oops|general protection|WARNING: ", kernel_log(hosts))


def kernel_log(lab_id: str) -> str:
    return str(rdmalab.up(lab=lab_id).remote.call("log")["log"])


# ---------------------------------------------------------------- what else may happen to hosts


@pytest.mark.long
def test_run_all_works_again_after_each_hosts_kernel_was_killed_in_the_middle(
    hosts: str, folder: Path
) -> None:
    """Killed with regions, connections and a limit all in use."""
    assert_runs_again(NAME, hosts, folder, until="own_piece(end")


OTHERS = """
import subprocess
for command in (["/bin/true"], ["python3", "-c", "1"]) * 20:
    subprocess.run(command, check=True)
"""


@pytest.mark.long
def test_b35_paging_on_demand_pins_nothing_and_harms_nobody(hosts: str, tmp_path: Path) -> None:
    """B35: the folded cell, five times; then other processes still run, and no kernel bug."""
    whole = solved(NAME)
    (odp,) = (cell for cell in whole.cells if "try_odp = False" in cell.source)
    assert odp.cell_type == "code" and "hide-input" in odp.metadata.tags
    odp.source = odp.source.replace("try_odp = False", "try_odp = True")
    whole.cells = [cell for cell in whole.cells if cell.cell_type == "code"] + [odp] * 4
    done = run(whole, tmp_path)
    assert errors(done) == {}
    demand = re.findall(r"on demand: (\d+) MiB pinned, (\d+) pages exist", printed(done))
    assert len(demand) == 5 and {pinned for pinned, _ in demand} == {"0"}
    assert "pinned   : 32 MiB pinned, 8192 pages exist" in printed(done)
    others = (
        "import subprocess\nfor _ in range(20):\n    subprocess.run(['/bin/true'], check=True)\n"
    )
    others += "    subprocess.run(['python3', '-c', '1'], check=True)"
    rdmalab.up(lab=hosts).alice.run(others, timeout_s=120)
    assert not re.search(r"BUG|Oops|general protection|WARNING: ", kernel_log(hosts))


FORK = """
import multiprocessing, subprocess
with Endpoint() as near, Endpoint() as far:
    near.connect_card(far.card)
    far.connect_card(near.card)
    paper = bytearray(PAGE + 123)  # neither size nor place fits pages
    where = ctypes.addressof(ctypes.c_char.from_buffer(paper))
    with MR(near.pd, len(paper), LOCAL | WRITE, where) as mr:
        subprocess.run(["echo", "hi"], check=True, stdout=subprocess.DEVNULL)
        child = multiprocessing.get_context("fork").Process(target=lambda: list(range(100_000)))
        child.start()
        child.join(20)
        far.mr.write(b"after the fork", 14)
        status = post(far, RDMA_WRITE, SGE(far.mr.buf, 14, far.mr.lkey), (where + 4000, mr.rkey))
        ended, found = child.exitcode, bytes(paper[4000:4014])
"""


@pytest.mark.long
def test_b36_a_fork_leaves_registered_memory_alone(done: NotebookNode, hosts: str) -> None:
    """B36: a shell line and a forked child after registering; the WRITE still comes in here."""
    alice = rdmalab.up(lab=hosts).alice
    alice.run(FORK)
    assert (alice.get("ended"), alice.get("status")) == (0, "SUCCESS")
    assert alice.get("found") == b"after the fork"


FAULTS = """
gone = address_of(allocate(PAGE))  # the memory is given back at once
names = []
with Context(name=here.device) as ctx, PD(ctx) as pd:
    for rights, where, size in ((NONE, gone, PAGE), (LOCAL, gone, PAGE), (LOCAL, gone, 0)):
        try:
            MR(pd, size, rights, where).close()
            names.append("ok")
        except PyverbsRDMAError as error:
            names.append(errno.errorcode[error.error_code])
"""


def test_the_table_of_symptoms_names_the_errors_that_come(done: NotebookNode, hosts: str) -> None:
    """Troubleshooting says: EFAULT for memory that is not there. (And no byte is EINVAL.)"""
    alice = rdmalab.up(lab=hosts).alice
    alice.run(FAULTS)
    assert alice.get("names") == ["EFAULT", "EFAULT", "EINVAL"]
    alice.run('from rdmalab.statuses import explain; said = explain("REM_ACCESS_ERR")')
    assert alice.get("said").startswith("IBV_WC_REM_ACCESS_ERR")
