"""Several at once: the same lab, other labs, one cache. None waits for ever, none hurts another."""

from __future__ import annotations

import json

import psutil
import pytest

from .sandbox import private_cache, sandbox

pytestmark = [pytest.mark.fabric, pytest.mark.long, pytest.mark.timeout(600)]


def test_two_starts_of_one_lab_at_the_same_instant() -> None:
    """Both succeed, with one and the same machine; a third finds it running."""
    with sandbox() as box:
        both = [box.start("up", "--json") for _ in range(2)]
        ended = [up.wait() for up in both]
        assert [done.code for done in ended] == [0, 0], ended
        first, second = (json.loads(done.out) for done in ended)
        assert first == second
        (pid,) = box.qemus()
        assert psutil.Process(pid).environ()["RDMALAB_RUNTIME_DIR"] == str(box.runtime)
        third = box.up()
        assert {key: third[key] for key in first} == first
        box.works()


def test_two_labs_first_start_in_one_cache() -> None:
    """Both boot, and share what one of them saved."""
    with private_cache() as cache, sandbox(cache) as box:
        ups = {lab: box.start("up", "alice", "--lab", lab, "--json") for lab in ("one", "two")}
        for lab, up in ups.items():
            done = up.wait()
            assert done.code == 0, done.err
            assert json.loads(done.out)["lab"] == lab
        saved = [entry.name for entry in (cache / "snapshots").iterdir()]
        assert len(saved) == 1 and not saved[0].startswith("."), saved
        assert len(box.qemus("one/")) == len(box.qemus("two/")) == 1
        for lab in ups:
            box.works(lab)


def test_one_of_two_labs_is_taken_down() -> None:
    """The other one works on, and `status` knows both and then one."""
    with sandbox() as box:
        macs = set()
        for lab in ("one", "two"):
            box.up("--lab", lab)
            box.works(lab, "alice", "10.0.0.2")
            state = json.loads((box.lab(lab) / "state.json").read_text())
            macs |= {host["mac"] for host in state["hosts"]}
        assert len(macs) == 4, "B05: no two hosts of two labs share an address on the wire"
        shown = json.loads(box.run("status", "--json").out)
        assert [lab["lab"] for lab in shown["labs"]] == ["one", "two"]
        assert box.run("down", "--lab", "one").out == "Stopped: one.\n"
        box.works("two", "bob", "10.0.0.1")
        shown = json.loads(box.run("status", "--json").out)
        assert [lab["lab"] for lab in shown["labs"]] == ["two"] and shown["leftovers"] == []


def test_other_hosts_than_those_that_run_are_refused() -> None:
    """With the names of those that run, and both ways on; nothing happens to the lab."""
    with sandbox() as box:
        before = box.up()
        done = box.run("up", "alice", "carol", "--json")
        assert (done.code, done.out) == (1, "")
        assert "runs already, with the hosts alice, bob" in done.err
        assert "rdmalab down" in done.err and "--lab ID" in done.err
        assert box.up("alice", "bob")["ready_s"] == before["ready_s"]
        box.works()
