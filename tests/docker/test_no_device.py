"""The docker backend on a kernel without Soft-RoCE: a real engine, real containers, and no device.

On a kernel with it, `tests/backends` tests the whole.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rdmalab import dockerengine, dockerhosts, dockerimage, dockerproof, image, lab, stewards
from rdmalab.doctor import software
from rdmalab.errors import MachineError
from rdmalab.topology import plan

pytestmark = [
    pytest.mark.docker,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not dockerengine.reachable(), reason="there is no Docker engine"),
]

RXE = Path("/sys/module/rdma_rxe").is_dir()
HAS_DEVICES = "this kernel has rdma_rxe: tests/backends tests what then happens"


@pytest.mark.may_skip(HAS_DEVICES)
def test_a_machine_without_rxe_is_told_before_anything_is_made() -> None:
    if RXE:
        pytest.skip(HAS_DEVICES)
    with pytest.raises(MachineError, match="has not loaded rdma_rxe"):
        lab.ensure(backend="docker", lab="no-rxe")
    assert software.docker_hosts().code == "docker_no_rxe"


@pytest.mark.may_skip(HAS_DEVICES)
def test_a_start_that_gets_no_device_says_why_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The wire is made, by keepers in containers, and the first device is refused by the kernel."""
    if RXE:
        pytest.skip(HAS_DEVICES)
    monkeypatch.setattr(dockerhosts, "need_kernel", lambda: None)
    said: list[str] = []
    before = lab.known()
    with pytest.raises(MachineError, match=r"makes no rxe device in a container .*7\.1 or newer"):
        lab.ensure(("alice", "bob"), backend="docker", lab="no-device", say=said.append)
    client = dockerengine.connect()
    assert dockerengine.ours(client, "no-device") == []
    assert stewards.strays("no-device") == [] and lab.known() == before
    found = image.find_image()
    assert found is not None
    name = dockerimage.present(client, found)
    assert name, "the hosts' image stays, for the next start"
    why, step = dockerproof.prove(client, name)
    assert "RDMA" in why and "modprobe" in step


def test_what_a_killed_start_left_is_removed_by_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container with the lab's labels, of which no folder and no process knows any more."""
    client = dockerengine.connect()
    found = image.find_image()
    assert found is not None
    name = dockerimage.ensure(client, found, print)
    spec = dockerhosts.keeper_spec("left", name, plan(["alice"])[0].name, "ns")
    sleeping = {**spec, "command": ["sleep", "300"], "volumes": {}, "auto_remove": False}
    client.containers.create(**sleeping).start()
    assert len(dockerengine.ours(client, "left")) == 1
    assert lab.down("left")
    assert dockerengine.ours(client, "left") == [] and not lab.down("left")
