"""What hosts that are processes of this machine (``local``) cannot do, in sentences that teach."""

from __future__ import annotations

from .errors import UsageError
from .state import LabState

__all__ = ["note", "require_faults", "require_wire"]

OTHER = "The backends vm and docker have it; docs/backends.md compares them."


def shared(state: LabState) -> bool:
    """Whether hosts have one device between them."""
    devices = [host["device"] for host in state.hosts]
    return state.backend == "local" and len(set(devices)) < len(devices)


def require_faults(state: LabState) -> None:
    """:class:`UsageError` where a fault would hit this machine's own network, or nothing at all."""
    if state.backend == "local":
        raise UsageError(
            "Hosts of the local backend use this machine's own network, and rdmalab breaks nothing"
            " there (what a NIC does in hardware, a fault in the kernel would not touch anyway).",
            next_step=OTHER,
        )


def require_wire(state: LabState) -> None:
    """:class:`UsageError` where no packet ever leaves the device."""
    if shared(state):
        raise UsageError(
            f"Hosts here share the device {state.hosts[0]['device']}, and what they send to each"
            " other never leaves it, so there is nothing to capture.",
            next_step="Give each a device of its own (RDMALAB_DEVICES=ONE,OTHER), or use the vm"
            " backend; docs/backends.md says how.",
        )


def note(state: LabState) -> str:
    """What a lab's text says of hosts and is not so here, in a sentence; empty where all holds."""
    if state.backend != "local":
        return ""
    whose = "one device" if shared(state) else "devices"
    return (
        f"hosts are processes of yours on {whose} of this machine: they see each other's files and"
        " processes, have no network of their own, and are isolated only by what a device enforces"
        " (protection domains, keys); faults are refused"
    )
