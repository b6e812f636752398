"""What the containers of a docker lab are made of: rights, devices, folders, names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rdmalab import dockerhosts, dockerproof
from rdmalab.errors import BackendError, MachineError
from rdmalab.topology import plan

from .sysfs import device

IMAGE = "rdmalab-host:0123456789abcdef"
NODES = ["/dev/infiniband/uverbs4", "/dev/infiniband/rdma_cm"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RDMALAB_RUNTIME_DIR", str(tmp_path / "r"))


def specs() -> dict[str, dict[str, Any]]:
    """All containers of a lab with one host, by what they are."""
    (alice,) = plan(["alice"])
    hidden = ["/sys/devices/virtual/infiniband/rxe_bob"]
    return {
        "switch": dockerhosts.switch_spec("one", IMAGE),
        "network": dockerhosts.network_spec("one", IMAGE, 0, alice),
        "host": dockerhosts.host_spec("one", IMAGE, 0, alice.for_guest(""), "{}", NODES, hidden),
    }


@pytest.mark.parametrize("which", ["switch", "network", "host"])
def test_no_container_has_more_than_it_needs(which: str) -> None:
    spec = specs()[which]
    assert spec["cap_drop"] == ["ALL"] and spec["security_opt"] == ["no-new-privileges"]
    assert spec["read_only"] is True and spec["auto_remove"] is True
    assert "privileged" not in spec and "docker.sock" not in json.dumps(spec)
    assert {"org.rdmalab.lab", "org.rdmalab.owner", "org.rdmalab.place"} <= set(spec["labels"])
    assert spec["mem_limit"] and spec["pids_limit"]
    writable = [mount for mount in spec["volumes"].values() if mount["mode"] == "rw"]
    assert [mount["bind"] for mount in writable] == ([] if which == "host" else ["/lab"])


def test_a_host_has_no_right_and_its_own_device_only() -> None:
    host = specs()["host"]
    assert "cap_add" not in host and host["user"] not in ("0:0", "", None)
    assert host["user"].split(":")[0] != "0"
    assert host["devices"] == [f"{node}:{node}:rw" for node in NODES]
    assert host["network_mode"] == f"container:{specs()['network']['name']}"
    assert host["tmpfs"]["/sys/devices/virtual/infiniband/rxe_bob"].startswith("ro,")
    assert "pid_mode" not in host


def test_a_keeper_has_rights_over_its_network_and_no_way_out() -> None:
    for which in ("switch", "network"):
        spec = specs()[which]
        assert set(spec["cap_add"]) == {"NET_ADMIN", "NET_RAW"} and "devices" not in spec
        assert spec["network_mode"] == "none"
    assert specs()["network"]["pid_mode"] == f"container:{specs()['switch']['name']}"


def test_two_folders_labs_of_one_name_have_containers_of_other_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {spec["name"] for spec in specs().values()}
    monkeypatch.setenv("RDMALAB_RUNTIME_DIR", str(tmp_path / "other"))
    assert not before & {spec["name"] for spec in specs().values()}


def test_a_devices_node_is_looked_up_and_all_other_devices_are_covered(tmp_path: Path) -> None:
    device(tmp_path, "rxe_alice", uverbs=4)
    device(tmp_path, "rxe_bob", uverbs=2)
    assert dockerhosts.nodes_of("rxe_alice", tmp_path) == NODES
    (other,) = dockerhosts.others("rxe_alice", tmp_path)
    assert other.endswith("/rxe_bob")
    with pytest.raises(BackendError, match="rxe_carol"):
        dockerhosts.nodes_of("rxe_carol", tmp_path)


def test_a_kernel_without_rxe_is_told_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"has not loaded rdma_rxe.*modprobe rdma_rxe"):
        dockerhosts.need_kernel(tmp_path)
    (tmp_path / "sys/module/rdma_rxe").mkdir(parents=True)
    dockerhosts.need_kernel(tmp_path)


@pytest.mark.parametrize(
    ("code", "said", "cause", "step"),
    [
        (1, "Failed to open NETLINK_RDMA socket", "no RDMA subsystem", "modprobe"),
        (2, "RTNETLINK answers: Operation not permitted", "rootless", "root"),
        (2, "Error: Unknown device type.", "network of its own", "veth"),
        (3, "error: Invalid argument", "makes no rxe device", "7.1"),
        (4, "", "exclusive", "set netns shared"),
    ],
)
def test_a_proof_that_fails_names_cause_and_next_step(
    code: int, said: str, cause: str, step: str
) -> None:
    why, next_step = dockerproof.reason(code, said)
    assert cause in why and step in next_step
