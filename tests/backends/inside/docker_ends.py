"""In the test machine, last: a lab that ends leaves nothing."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

import rdmalab
from rdmalab import lab as labs

from .docker_hosts import LAB, docker


def left() -> dict[str, list[str]]:
    """All that labs make on a machine, by what other programs say."""
    mark = b"RDMALAB_RUNTIME_DIR=" + os.environb[b"RDMALAB_RUNTIME_DIR"]
    stewards = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line = (entry / "cmdline").read_bytes()
            if b"rdmalab.steward" in line and mark in (entry / "environ").read_bytes():
                stewards.append(line.decode())
    rdma = subprocess.check_output(["rdma", "link"], text=True).splitlines()
    return {
        "containers": docker("ps", "--all", "--quiet", "--filter", f"label={LAB}").split(),
        "networks": docker("network", "ls", "--quiet", "--filter", f"label={LAB}").split(),
        "volumes": docker("volume", "ls", "--quiet").split(),
        "links": [line for line in rdma if "rxe_alice" in line or "rxe_bob" in line],
        "interfaces": [
            name for name in os.listdir("/sys/class/net") if name.startswith(("v", "br0"))
        ],
        "stewards": stewards,
    }


NOTHING: dict[str, list[str]] = {
    "containers": [],
    "networks": [],
    "volumes": [],
    "links": [],
    "interfaces": [],
    "stewards": [],
}


def test_down_leaves_nothing() -> None:
    rdmalab.up(lab="shared")
    before = left()
    assert len(before["containers"]) == 5 and len(before["links"]) == 2, "this looks at the right"
    assert labs.down("shared")
    assert left() == NOTHING
