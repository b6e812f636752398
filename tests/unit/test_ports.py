"""Which ports of this machine's RDMA devices hosts could sit on, and what is said where none could.

The trees have what sysfs has (compare `find /sys/class/infiniband/*/ports` on a machine with rxe).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rdmalab.doctor import ports
from rdmalab.doctor.ports import Port

from .sysfs import device

LINK_LOCAL = "fe80:0000:0000:0000:002b:38ff:fe6f:7f01"
MAPPED = "0000:0000:0000:0000:0000:ffff:0a00:0001"  # ::ffff:10.0.0.1
OTHER = "0000:0000:0000:0000:0000:ffff:0a00:0002"


def test_a_port_is_found_with_the_row_of_its_ipv4_gid(tmp_path: Path) -> None:
    """Row 0 is the link-local one, and version 1 of RoCE knows no address at all."""
    rows = {0: (LINK_LOCAL, "RoCE v2"), 2: (MAPPED, "IB/RoCE v1"), 3: (MAPPED, "RoCE v2")}
    device(tmp_path, "rxe0", gids=rows, netdev="enp1s0")
    assert ports.found(tmp_path) == ([Port("rxe0", 1, "10.0.0.1", 3, "enp1s0")], [])


@pytest.mark.parametrize(
    ("facts", "word"),
    [
        ({"state": "1: DOWN"}, "DOWN"),
        ({"layer": "InfiniBand"}, "InfiniBand"),
        ({"gids": {0: (LINK_LOCAL, "RoCE v2")}}, "no RoCE v2 GID of an IPv4 address"),
    ],
)
def test_each_reason_against_a_port_is_told(
    tmp_path: Path, facts: dict[str, object], word: str
) -> None:
    device(tmp_path, "mlx5_0", **{"gids": {0: (MAPPED, "RoCE v2")}, **facts})  # type: ignore[arg-type]  # a test's table
    chosen, why_not = ports.choose([], tmp_path)
    assert chosen == [] and word in why_not and "mlx5_0 port 1" in why_not


def test_hosts_share_the_first_port_or_have_those_that_are_named(tmp_path: Path) -> None:
    device(tmp_path, "rxe_a", gids={1: (MAPPED, "RoCE v2")})
    device(tmp_path, "rxe_b", gids={1: (OTHER, "RoCE v2")})
    assert [port.device for port in ports.choose([], tmp_path)[0]] == ["rxe_a"]
    assert [p.device for p in ports.choose(["rxe_b", "rxe_a"], tmp_path)[0]] == ["rxe_b", "rxe_a"]


def test_a_device_that_is_named_and_not_there_is_told_with_those_that_are(tmp_path: Path) -> None:
    device(tmp_path, "rxe_a", gids={1: (MAPPED, "RoCE v2")})
    chosen, why_not = ports.choose(["rxe_a", "mlx5_7"], tmp_path)
    assert chosen == [] and "mlx5_7" in why_not and "usable: rxe_a" in why_not


def test_a_machine_without_any_device_says_so(tmp_path: Path) -> None:
    check = ports.local_hosts(tmp_path)
    assert (check.status, check.code) == ("fail", "local_no_port")
    assert "there is none" in check.detail and "rdma link add" in check.fix


def test_a_python_without_pyverbs_is_told_with_the_packages_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real Python without any package beside it: an empty prefix with -I as its wrapper."""
    device(tmp_path, "rxe0", gids={1: (MAPPED, "RoCE v2")})
    wrapper = tmp_path / "bare-python"
    wrapper.write_text('#!/bin/sh\nexec /usr/bin/python3 -S -E "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("RDMALAB_PYTHON", str(wrapper))
    check = ports.local_hosts(tmp_path)
    assert check.code == "local_python" and "python3-pyverbs python3-ipykernel" in check.fix


def test_a_device_that_carries_no_message_does_not_pass(tmp_path: Path) -> None:
    """The proof is asked of the machine itself: a tree that promises a device is not enough."""
    failed = ports.proof("/usr/bin/python3", [Port("rxe_of_a_tree", 1, "10.0.0.1", 1, "eth0")])
    assert failed and "\n" not in failed
