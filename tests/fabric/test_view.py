"""Pictures that ask the hosts: tables against other tools, the state diagram against the kernel.

The page's side of the diagram is tested in tests/browser.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable

import pytest

import rdmalab
from rdmalab import lab as labs
from rdmalab import view
from rdmalab.hostside.qpstate import MOVES

pytestmark = [pytest.mark.fabric, pytest.mark.long]

MAKE = """
import pyverbs.enums as e
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from rdmalab import here

ctx = Context(name=here.device)
pd, cq = PD(ctx), CQ(ctx, 16)
cap = QPCap(max_send_wr=8, max_recv_wr=8)
qp = QP(pd, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=cq, rcq=cq, cap=cap))
"""
WAY = {  # states to pass before a move from here can be tried
    "RESET": (),
    "INIT": ("INIT",),
    "RTR": ("INIT", "RTR"),
    "RTS": ("INIT", "RTR", "RTS"),
    "SQD": ("INIT", "RTR", "RTS", "SQD"),
    "ERR": ("INIT", "ERR"),
}


def witness(guest: Callable, lab: rdmalab.Lab, host: str = "alice") -> list[str]:
    """The states of a host's own queue pairs, by the kernel's netlink interface."""
    shown = json.loads(guest(lab, "rdma -j resource show qp").out)
    mine = [one for one in shown if one["ifname"] == f"rxe_{host}" and one["type"] == "RC"]
    return [one["state"] for one in mine]


def test_the_device_table_says_what_ibv_devinfo_says(lab: rdmalab.Lab, sh: Callable) -> None:
    table = view.devices(lab)
    for column, host in enumerate(lab.hosts, 1):
        said = sh(lab, host.name, f"ibv_devinfo -v -d {host.device}").out
        rows = {row[0]: row[column] for row in table.rows}
        facts = dict(re.findall(r"^\s*(\w+):\s+(\S.*)$", said, re.MULTILINE))
        assert rows["device"] == facts["hca_id"]
        assert rows["link"] in facts["state"].lower()
        assert rows["link layer"] == facts["link_layer"]
        assert rows["path MTU"].split()[0] == facts["active_mtu"].split()[0]
        assert rows["queue pairs"].replace(",", "") == facts["max_qp"]
        assert rows["memory regions"].replace(",", "") == facts["max_mr"]
        assert rows["reads in flight"] == facts["max_qp_rd_atom"]
        assert rows["address"] == host.ip
    assert repr(table).count("rxe_") == 2
    page = table._repr_html_()
    assert page.count("<th scope") == len(table.head) + len(table.rows)


def test_the_gid_table_says_what_sysfs_says(lab: rdmalab.Lab, sh: Callable) -> None:
    table = view.gids(lab)
    for host in lab.hosts:
        base = f"/sys/class/infiniband/{host.device}/ports/1"
        said = sh(lab, host.name, f"cd {base}/gids; grep -v :0000:0000:0000$ * | sort -n").out
        wanted = [line.split(":", 1)[0] for line in said.splitlines()]
        mine = [row for row in table.rows if row[0] == host.name]
        assert [row[1] for row in mine] == wanted
        (chosen,) = (row for row in mine if "choose this one" in row[5])
        assert chosen[2] == f"::ffff:{host.ip}"
        assert int(chosen[1]) == host.gid_index


def test_the_tables_say_which_host_does_not_answer(lab: rdmalab.Lab) -> None:
    job = lab.bob.start("import time; time.sleep(3)")
    table = view.gids(lab)
    said = {row[0]: row[-1] for row in table.rows}
    assert "at work" in said["bob"]
    assert "IPv4: choose this one" in [row[-1] for row in table.rows if row[0] == "alice"]
    job.result()


def test_code_walks_it_and_the_kernel_agrees(lab: rdmalab.Lab, guest: Callable) -> None:
    """Plain calls do what clicks do: a notebook without widgets loses nothing."""
    for host in lab.hosts:
        host.run(MAKE)
    diagram = view.qp_diagram(lab.alice, "qp", peer=lab.bob)
    for old, new in [("RESET", "INIT"), ("INIT", "RTR"), ("RTR", "RTS"), ("RTS", "SQD")]:
        assert diagram.state == old
        assert diagram.move(new).startswith(f"{old} to {new}: done")
        assert witness(guest, lab) == [new]
    shown = json.loads(guest(lab, "rdma -j resource show qp").out)
    ends = {one["ifname"]: one for one in shown if one["type"] == "RC"}
    assert ends["rxe_alice"]["rqpn"] == ends["rxe_bob"]["lqpn"], "the peer's number was filled in"


@pytest.mark.long
@pytest.mark.parametrize("old", WAY)
def test_every_move_is_tried_and_agrees_with_the_table(
    lab: rdmalab.Lab, guest: Callable, old: str
) -> None:
    """All seven from each state that can be reached; refusals leave it where it is, in words."""
    for host in lab.hosts:
        host.run(MAKE)
    diagram = view.qp_diagram(lab.alice, "qp", peer=lab.bob)
    for new in ("RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR"):
        diagram.move("RESET")
        for step in WAY[old]:
            diagram.move(step)
        assert diagram.state == old
        answer = diagram.move(new)
        if (old, new) in MOVES:
            assert answer.startswith(f"{old} to {new}: done"), answer
            assert witness(guest, lab) == [new]
        else:
            assert answer.startswith(f"{old} to {new}: refused with EINVAL"), answer
            assert witness(guest, lab) == [old]


def test_b13_what_the_kernel_refuses_is_said_in_words(lab: rdmalab.Lab) -> None:
    lab.alice.run(MAKE)
    diagram = view.qp_diagram(lab.alice, "qp", peer={"gid": lab.bob.gid, "qp_num": 17})
    diagram.move("INIT")
    said = [
        diagram.move("RTR", dgid=""),
        diagram.move("RTR", dgid="::ffff:10.0.0.99"),
        diagram.move("RTR", dgid=lab.bob.gid, sgid_index=0),
        diagram.move("RTR", sgid_index=9),
        diagram.move("RTS"),
        diagram.move("RTR", sgid_index=1, path_mtu="large"),
    ]
    parts = (
        "has no GID",
        "Nobody answered when the kernel asked for the Ethernet address of 10.0.0.99",
        "both GIDs must be of one kind",
        "Row 9 of our GID table is empty",
        "RTS can be reached from RTR, SQD",
        "Not asked: path_mtu must be a whole number",
    )
    for text, part in zip(said, parts, strict=True):
        assert part in text
    assert diagram.state == "INIT"


def test_looking_harms_nothing(lab: rdmalab.Lab) -> None:
    """No name and no history is left; a closed queue pair is told apart without touching it."""
    lab.alice.run(MAKE + "names = set(globals())")
    diagram = view.qp_diagram(lab.alice, "qp")
    assert diagram.state == "RESET"
    lab.alice.run("added = sorted(set(globals()) - names - {'names', 'added'} - set('_'))")
    assert [name for name in lab.alice.get("added") if not name.startswith("_i")] == []
    lab.alice.run("qp.close()")
    assert diagram.state == ""
    assert "qp is closed" in diagram.scene.answer
    lab.alice.run("other = [qp]; qp = 7")
    assert diagram.state == ""
    assert "qp is no queue pair but an int" in diagram.scene.status()
    lab.alice.run("del qp")
    assert diagram.state == ""
    assert "there is no variable 'qp'" in diagram.scene.status()


def test_a_queue_pair_of_an_object_is_found(lab: rdmalab.Lab) -> None:
    """``ep.qp`` of an Endpoint is a name like any other."""
    lab.alice.run("from rdmalab.verbs import Endpoint\nep = Endpoint()")
    diagram = view.qp_diagram(lab.alice, "ep.qp")
    before = diagram.state
    assert before in ("RESET", "INIT")
    assert diagram.move("RESET").startswith(f"{before} to RESET: done")
    lab.alice.run("ep.close()")


def test_a_host_at_work_is_neither_waited_for_nor_stopped(lab: rdmalab.Lab, sh: Callable) -> None:
    """Also when the work is another notebook's, which this one cannot know of."""
    lab.alice.run(MAKE)
    diagram = view.qp_diagram(lab.alice, "qp")
    other = labs.Lab(lab.state)
    try:
        begun = "import time\nopen('/tmp/at-work', 'w').close()\n"
        job = other.alice.start(f"{begun}time.sleep(7)\nslept = True")
        end = time.monotonic() + 60
        while sh(lab, "alice", "test -e /tmp/at-work").code != 0:
            assert time.monotonic() < end
            time.sleep(0.1)
        begin = time.monotonic()
        diagram.refresh()
        assert "at work" in diagram.scene.answer
        assert time.monotonic() - begin < 30
        job.result()
        assert lab.alice.get("slept") is True
        assert diagram.state == "RESET"
    finally:
        other.close()


def test_a_fresh_kernel_is_said_and_a_new_queue_pair_is_found(lab: rdmalab.Lab) -> None:
    lab.alice.run(MAKE)
    diagram = view.qp_diagram(lab.alice, "qp")
    lab.alice.restart()
    assert diagram.state == ""
    assert "there is no variable 'qp'" in diagram.scene.answer
    lab.alice.run(MAKE)
    assert diagram.state == "RESET"
    assert "qp is there" in diagram.scene.answer
