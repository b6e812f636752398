"""In the test machine, on the lab that is up: what Docker itself says of the hosts' containers."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

import rdmalab

from ...fabric.conftest import Ran

Shell = Callable[..., Ran]

LAB = "org.rdmalab.lab"


def docker(*words: str) -> str:
    return subprocess.run(
        ["docker", *words], check=True, capture_output=True, text=True, timeout=120
    ).stdout


def containers(lab: rdmalab.Lab) -> dict[str, dict[str, Any]]:
    """By the last part of their names, as `docker inspect` shows them."""
    ids = docker("ps", "--all", "--quiet", "--filter", f"label={LAB}={lab.id}").split()
    shown = json.loads(docker("inspect", *ids))
    return {re.sub(r"^/rdmalab-[\w-]+?-[0-9a-f]{6}-", "", one["Name"]): one for one in shown}


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    return containers(rdmalab.up(lab="shared"))


def test_each_host_has_a_container_and_one_that_keeps_its_network(
    found: dict[str, dict[str, Any]],
) -> None:
    assert set(found) == {"alice", "bob", "net-alice", "net-bob", "switch"}
    for name in ("alice", "bob"):
        keeper = found[f"net-{name}"]["Id"]
        assert found[name]["HostConfig"]["NetworkMode"] == f"container:{keeper}"


def test_no_container_has_more_rights_than_it_needs(found: dict[str, dict[str, Any]]) -> None:
    for name, one in found.items():
        host = one["HostConfig"]
        assert host["CapDrop"] == ["ALL"] and host["ReadonlyRootfs"] and not host["Privileged"]
        assert "no-new-privileges" in host["SecurityOpt"]
        assert not any("docker.sock" in str(mount) for mount in one["Mounts"])
        capabilities = {word.removeprefix("CAP_") for word in host["CapAdd"] or ()}
        if name in ("alice", "bob"):
            assert capabilities == set() and one["Config"]["User"].split(":")[0] not in ("", "0")
            nodes = [device["PathOnHost"] for device in host["Devices"]]
            assert len(nodes) == 2 and "/dev/infiniband/rdma_cm" in nodes
        else:
            assert capabilities <= {"NET_ADMIN", "NET_RAW"} and not host["Devices"]


def test_a_host_cannot_open_the_others_device(
    found: dict[str, dict[str, Any]], shared_lab: rdmalab.Lab, sh: Shell
) -> None:
    """Not even if its node were there: the machine's root puts one into alice's /dev here."""
    for name, other in (("alice", "bob"), ("bob", "alice")):
        assert sh(shared_lab, name, f"ls /sys/class/infiniband/rxe_{other}/ports").code != 0
        assert f"rxe_{other}" not in sh(shared_lab, name, "ibv_devices").out
        assert sh(shared_lab, name, "mknod /tmp/node c 231 192").code != 0
    (theirs,) = (
        device["PathOnHost"]
        for device in found["bob"]["HostConfig"]["Devices"]
        if "uverbs" in device["PathOnHost"]
    )
    number = subprocess.check_output(["stat", "-c", "%Hr %Lr", theirs], text=True).split()
    pid = str(found["alice"]["State"]["Pid"])
    put = ["nsenter", "--target", pid, "--mount", "mknod", "--mode=666", "/dev/theirs", "c"]
    subprocess.run([*put, *number], check=True)
    ran = sh(shared_lab, "alice", "cat /dev/theirs")
    assert ran.code != 0 and "Operation not permitted" in ran.err, "by the device control group"
    own = sh(shared_lab, "alice", "ls /dev/infiniband/uverbs*").out.strip()
    assert sh(shared_lab, "alice", f"exec 3<>{own}").code == 0, "its own one opens"


PIN = """
import resource
from pyverbs.device import Context
from pyverbs.pd import PD
from pyverbs.mr import MR
from rdmalab import here
limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
with Context(name=here.device) as ctx, PD(ctx) as pd, MR(pd, 16 << 20, 0) as mr:
    length = mr.length
"""


def test_b04_a_host_may_pin_more_than_an_engine_allows_by_default(
    shared_lab: rdmalab.Lab,
) -> None:
    """B04: 8 MiB are Docker's default; this engine may raise it, so hosts have what labs say."""
    shared_lab.alice.run(PIN)
    assert shared_lab.alice.get("limit") == 64 << 20
    assert shared_lab.alice.get("length") == 16 << 20


def test_hosts_reach_each_other_and_nothing_else(shared_lab: rdmalab.Lab, sh: Shell) -> None:
    assert sh(shared_lab, "alice", "ping -c 1 -W 5 bob").code == 0
    routes = sh(shared_lab, "alice", "ip -4 route").out
    assert "default" not in routes and routes.count("\n") == 1, routes
