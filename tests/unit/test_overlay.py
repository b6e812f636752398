"""What is laid over the guest: the same for the same hosts, and the controller only for a desk."""

from __future__ import annotations

import json

from rdmalab import overlay, topology

HOSTS = topology.plan(["alice", "bob"])
PLAN = "overlay/opt/rdmalab/lab.json"


def test_without_a_desk_nothing_of_the_controller_travels() -> None:
    files = overlay.files(HOSTS)
    assert {name.split("/")[2] for name in files} == {"rdmalab"}
    assert "overlay/opt/rdmalab/boot.py" in files
    assert set(json.loads(files[PLAN])) == {"hosts"}


def test_a_desk_brings_what_a_notebook_uses_and_nothing_of_grading() -> None:
    files = overlay.files([*HOSTS, topology.DESK])
    desk = {name for name in files if name.startswith("overlay/opt/desk/rdmalab/")}
    assert set(files) - desk == set(overlay.files(HOSTS))
    assert {"__init__.py", "lab.py", "view/qpdiagram.js", "hostside/qpstate.py"} <= {
        name.removeprefix("overlay/opt/desk/rdmalab/") for name in desk
    }
    assert not [name for name in desk if "/grading" in name]
    plan = json.loads(files[PLAN])
    assert [host["name"] for host in plan["hosts"]] == ["alice", "bob"]
    assert plan["desk"]["name"] == "desk" and not plan["desk"]["device"]


def test_a_snapshot_of_the_one_is_not_taken_for_the_other() -> None:
    without, having = overlay.files(HOSTS), overlay.files([*HOSTS, topology.DESK])
    assert overlay.digest(without) == overlay.digest(overlay.files(HOSTS))
    assert overlay.digest(without) != overlay.digest(having)
