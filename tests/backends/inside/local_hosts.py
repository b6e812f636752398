"""In the test machine: hosts as processes on this machine's own devices, shared and one each."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import rdmalab
from rdmalab import lab as labs
from rdmalab.errors import MachineError, UsageError

from ...fabric.conftest import Ran
from ...fabric.endpoints import value

Shell = Callable[..., Ran]


said: list[str] = []  # at its start


@pytest.fixture(scope="module")
def shared_device() -> Iterator[rdmalab.Lab]:
    """A lab whose hosts share one device, as on a laptop with one NIC."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RDMALAB_DEVICES", "rxe_a")
        yield rdmalab.up(lab="one", backend="local", say=said.append)
    labs.down("one")


def test_its_start_says_what_differs(shared_device: rdmalab.Lab) -> None:
    assert any("isolated only by what a device enforces" in line for line in said), said


def test_hosts_are_processes_of_this_machine(shared_device: rdmalab.Lab, sh: Shell) -> None:
    """This machine sees them, they see each other, and none has more rights than their owner."""
    pids = {
        host.name: sh(shared_device, host.name, "echo $PPID").out for host in shared_device.hosts
    }
    assert len(set(pids.values())) == 2
    assert {host.device for host in shared_device.hosts} == {"rxe_a"}
    assert sh(shared_device, "alice", "hostname").out.strip() == os.uname().nodename
    assert sh(shared_device, "alice", "id -u").out.strip() == str(os.getuid())


def test_a_message_goes_from_host_to_host(shared_device: rdmalab.Lab) -> None:
    """Real verbs: bob's memory has alice's bytes, with nothing in between but the device."""
    alice, bob = shared_device.alice, shared_device.bob
    for host in (alice, bob):
        host.run("from rdmalab.verbs import Endpoint\nep = Endpoint()")
    cards = {host.name: value(host, "ep.card.as_dict()") for host in (alice, bob)}
    for host, peer in ((alice, "bob"), (bob, "alice")):
        host.put(peer_card=cards[peer])
        host.run("ep.connect_card(peer_card)")
    alice.run("ep.write(b'by RDMA', 100)")
    assert value(bob, "bytes(ep.buffer[100:107])") == b"by RDMA"


def test_what_local_hosts_cannot_do_is_refused_with_a_reason(shared_device: rdmalab.Lab) -> None:
    with pytest.raises(UsageError, match="this machine's own network"):
        shared_device.fault("bob", loss="5%")
    with pytest.raises(UsageError, match="never leaves it"), shared_device.capture("bob"):
        pass


def test_a_device_that_is_not_there_is_said_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RDMALAB_DEVICES", "mlx5_9")
    with pytest.raises(MachineError, match="mlx5_9"):
        rdmalab.up(lab="none", backend="local")
    assert not labs.down("none")


def test_down_ends_their_processes_and_leaves_the_devices(shared_device: rdmalab.Lab) -> None:
    pid = shared_device.state.pid
    assert labs.down("one")
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            assert b"labs/one" not in entry.read_bytes(), entry.parent.name
        except OSError:
            continue
    assert not Path(f"/proc/{pid}").exists()
    links = subprocess.check_output(["rdma", "link"], text=True)
    assert "rxe_a/1" in links and "rxe_b/1" in links
