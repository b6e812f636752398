"""Ports of this machine's RDMA devices that hosts could sit on, and the proof that they carry data.

A host needs an active Ethernet port with a RoCE v2 GID made from an IPv4 address. All of that is
read from sysfs; whether a message really gets through is tried (``hostside/proof.py``), on the
Python that would run the hosts. Standard library only.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from .machine import ROOT, Check, first_line, read, run

__all__ = ["Port", "choose", "found", "host_python", "local_hosts", "proof", "wanted"]

PROOF = Path(__file__).parent.parent / "hostside" / "proof.py"
PROOF_S = 30.0
PYTHON = "/usr/bin/python3"
NEEDED = {
    "pyverbs": "python3-pyverbs",
    "ipykernel": "python3-ipykernel",
    "numpy": "python3-numpy",
}
LACKING = "import importlib.util as u, sys; print(*(n for n in sys.argv[1:] if not u.find_spec(n)))"


class Port(NamedTuple):
    """One port, with the GID that a host would use."""

    device: str
    number: int
    ip: str
    gid_index: int
    netdev: str


def found(root: Path = ROOT) -> tuple[list[Port], list[str]]:
    """The ports that could carry RoCE v2 over IPv4, and for each other port why not."""
    ports, others = [], []
    for folder in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        device, number = folder.parts[-3], int(folder.name)
        state = read(folder / "state").partition(": ")[2]
        layer = read(folder / "link_layer")
        gids = list(_gids(folder))
        if layer != "Ethernet":
            others.append(f"{device} port {number} is {layer}, and the labs speak RoCE v2")
        elif state != "ACTIVE":
            others.append(f"{device} port {number} is {state or 'in no state'}: is its link up?")
        elif not gids:
            others.append(f"{device} port {number} has no RoCE v2 GID of an IPv4 address")
        else:
            ip, row, netdev = gids[0]
            ports.append(Port(device, number, ip, row, netdev))
    return ports, others


def _gids(port: Path) -> Iterator[tuple[str, int, str]]:
    """The port's RoCE v2 GIDs that are IPv4 addresses: address, row, interface."""
    for entry in sorted((port / "gids").iterdir(), key=lambda entry: int(entry.name)):
        kind = read(port / "gid_attrs/types" / entry.name)
        if "v2" not in kind:
            continue
        mapped = ipaddress.IPv6Address(read(entry)).ipv4_mapped
        if mapped is not None:
            yield str(mapped), int(entry.name), read(port / "gid_attrs/ndevs" / entry.name)


def choose(wanted: Sequence[str], root: Path = ROOT) -> tuple[list[Port], str]:
    """The ports that hosts get, one after the other, and why there is none (else empty).

    ``wanted``: names of devices, one for each host; without any, hosts share the first that works.
    """
    ports, others = found(root)
    known = {port.device: port for port in reversed(ports)}
    missing = [name for name in wanted if name not in known]
    if missing or not ports:
        seen = "; ".join(others) or "there is none" if not ports else f"usable: {', '.join(known)}"
        if missing:
            return [], f"RDMALAB_DEVICES names {missing[0]}, which hosts cannot use here ({seen})."
        return [], f"No RDMA device of this machine can carry the labs' messages ({seen})."
    return ([known[name] for name in wanted] or ports[:1]), ""


def host_python() -> tuple[str, list[str]]:
    """The Python that hosts run on, and the Debian packages that it lacks."""
    python = os.environ.get("RDMALAB_PYTHON") or PYTHON
    code, text = run([python, "-c", LACKING, *NEEDED])
    lacking = text.split() if code == 0 else list(NEEDED)
    return python, [NEEDED[name] for name in lacking if name in NEEDED]


def proof(python: str, ports: Sequence[Port]) -> str:
    """Send a message from the first to the last of these ports; what failed, else nothing."""
    ends = [str(word) for port in (ports[0], ports[-1]) for word in (*port[:2], port.gid_index)]
    code, text = run([python, str(PROOF), *ends], PROOF_S)
    if code == 0 and text.strip() == "ok":
        return ""
    lines = text.strip().splitlines()
    return lines[-1] if lines else first_line(text) or f"exit code {code}"


def local_hosts(root: Path = ROOT) -> Check:
    """Can hosts run as processes on this machine's devices? A real message decides."""
    ports, why_not = choose(wanted(), root)
    if why_not:
        step = "`sudo rdma link add rxe0 type rxe netdev eth0`, with your interface for eth0."
        return Check("local hosts", "fail", why_not.rstrip("."), step, "local_no_port")
    python, lacking = host_python()
    if lacking:
        step = f"`apt-get install {' '.join(lacking)}`, or name a Python in RDMALAB_PYTHON."
        detail = f"{python} has no {', '.join(lacking)}"
        return Check("local hosts", "fail", detail, step, "local_python")
    seats = ", ".join(f"{port.device} ({port.ip})" for port in ports)
    failed = proof(python, ports)
    if failed:
        step = "Try one shared device (RDMALAB_DEVICES=NAME), or `--backend vm`."
        return Check("local hosts", "fail", f"{seats}: {failed}", step, "local_no_message")
    return Check("local hosts", "ok", f"a message got through on {seats}", code="local_ok")


def wanted() -> list[str]:
    """The devices that RDMALAB_DEVICES names."""
    return [name for name in os.environ.get("RDMALAB_DEVICES", "").split(",") if name]
