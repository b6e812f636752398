"""What is laid over the guest's root when it boots: this package's files, and the lab's plan.

::

    /opt/rdmalab/       the hosts' side: boot.py, lab.json (the plan), rdmalab/ (our hostside/)
    /opt/desk/rdmalab/  the package as a notebook has it; only where there is a desk
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .topology import DESK, HostPlan, mac_addresses

__all__ = ["digest", "files"]

PACKAGE = Path(__file__).parent
DESK_ROOMS = (".", "doctor", "hostside", "view")  # grading is no business of a notebook
KINDS = (".py", ".js", ".css")


def files(hosts: list[HostPlan]) -> dict[str, bytes]:
    """The files by their names in the initrd's archive."""
    found = {}
    for file in sorted((PACKAGE / "hostside").glob("*.py")):
        folder = "opt/rdmalab" if file.name == "boot.py" else "opt/rdmalab/rdmalab"
        found[f"overlay/{folder}/{file.name}"] = file.read_bytes()
    seats = [host for host in hosts if host != DESK]
    macs = mac_addresses("", "", [host.name for host in seats])
    plan: dict[str, Any] = {"hosts": [host.for_guest(macs[host.name]) for host in seats]}
    if DESK in hosts:
        plan["desk"] = DESK.for_guest("")
        for file in desk_files():
            name = f"overlay/opt/desk/rdmalab/{file.relative_to(PACKAGE)}"
            found[name] = file.read_bytes()
    found["overlay/opt/rdmalab/lab.json"] = json.dumps(plan).encode()
    return found


def desk_files() -> Iterator[Path]:
    """What of this package a notebook uses."""
    for room in DESK_ROOMS:
        for file in sorted((PACKAGE / room).iterdir()):
            if file.suffix in KINDS:
                yield file


def digest(files: dict[str, bytes]) -> str:
    """One checksum over names and contents."""
    total = hashlib.sha256()
    for name, data in files.items():
        total.update(f"{name}\0{len(data)}\0".encode() + data)
    return total.hexdigest()
