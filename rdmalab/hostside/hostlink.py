"""What the guest's own processes share: the agent's side of a host, ports, the console."""

from __future__ import annotations

import socket
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from .network import HostSpec

__all__ = ["CHANNELS", "CONTROL_PORT", "DESK_PORT", "GUEST_ADDRESS", "HostLink", "listen", "say"]

CHANNELS = ("shell", "iopub", "stdin", "control", "hb")
CONTROL_PORT = 7000
DESK_PORT = 7001  # the control service as the desk reaches it; not forwarded to the outside
GUEST_ADDRESS = "10.0.2.15"


@dataclass
class HostLink:
    """The agent's side of one host."""

    spec: HostSpec
    index: int
    sock: socket.socket
    listeners: dict[str, socket.socket]
    state: str = "starting"
    mtu: int = 0
    keys: dict[str, str] = field(default_factory=dict)
    here: dict[str, Any] = field(default_factory=dict)


def say(text: str) -> None:
    """One line on the guest's console, which the controller keeps as a log."""
    print(f"rdmalab-agent {time.monotonic():7.2f}  {text}", file=sys.__stderr__, flush=True)


def listen(port: int) -> socket.socket:
    """A listening socket on the guest's own link; hosts cannot reach that address."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((GUEST_ADDRESS, port))
    sock.listen(64)
    return sock
