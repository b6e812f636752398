"""A host as the lab's own processes see it: the way to its first process, its keys, its state."""

from __future__ import annotations

import base64
import json
import os
import secrets
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from .network import HostSpec

__all__ = [
    "CHANNELS",
    "CONTROL_PORT",
    "DESK_PORT",
    "GUEST_ADDRESS",
    "HostFailed",
    "HostLink",
    "fresh_keys",
    "listen",
    "say",
]

CHANNELS = ("shell", "iopub", "stdin", "control", "hb")
CONTROL_PORT = 7000
DESK_PORT = 7001  # the control service as the desk reaches it; not forwarded to the outside
GUEST_ADDRESS = "10.0.2.15"
EVENT_BYTES = 65536


class HostFailed(RuntimeError):
    """A host that is being started has ended, or says that it cannot go on."""

    def __init__(self, host: str, event: dict[str, Any]) -> None:
        super().__init__(f"host {host}: {event}")
        self.host = host
        lines = str(event.get("detail", event)).strip().splitlines()
        self.last_word = lines[-1] if lines else ""


def fresh_keys() -> dict[str, str]:
    """Keys, and a seed for random numbers, for one kernel."""
    import zmq  # here, since a guest that boots has better things to do

    public, secret = zmq.curve_keypair()
    return {
        "key": secrets.token_hex(32),
        "session": secrets.token_hex(16),
        "curve_publickey": public.decode(),
        "curve_secretkey": secret.decode(),
        "seed": base64.b64encode(os.urandom(32)).decode(),
    }


@dataclass
class HostLink:
    """The agent's side of one host. ``port``: of its RDMA device."""

    spec: HostSpec
    index: int
    sock: socket.socket
    listeners: dict[str, socket.socket]
    state: str = "starting"
    mtu: int = 0
    keys: dict[str, str] = field(default_factory=dict)
    here: dict[str, Any] = field(default_factory=dict)
    port: int = 1

    def wait(self, state: str, timeout_s: float) -> None:
        """Follow the host until it is that far. Raises :class:`HostFailed` or ``TimeoutError``."""
        self.sock.settimeout(timeout_s)
        while self.state != state:
            data = self.sock.recv(EVENT_BYTES)
            event = json.loads(data) if data else {"event": "failed", "detail": "host init is gone"}
            if event["event"] in ("failed", "died"):
                raise HostFailed(self.spec.name, event)
            self.state = event["event"]
            self.mtu = int(event.get("mtu", self.mtu))
        self.sock.settimeout(None)

    def introduce(self, lab: str, peers: dict[str, str], mac: str) -> None:
        """Tell the host who it is and give its kernel keys of its own."""
        spec = self.spec
        self.keys = fresh_keys()
        self.here = {
            "lab": lab,
            "name": spec.name,
            "ip": spec.ip,
            "device": spec.device,
            "port": self.port,
            "gid": f"::ffff:{spec.ip}",
            "mtu": self.mtu,
            "peers": peers,
        }
        message = {"op": "kernel", "keys": self.keys, "here": self.here, "mac": mac}
        self.sock.send(json.dumps(message).encode())

    def facts(self) -> dict[str, Any]:
        """What a controller must know of the host, but for the way to its kernel."""
        return {key: self.here[key] for key in ("name", "ip", "device", "gid", "mtu")}

    def secrets(self) -> dict[str, str]:
        """What a client must know to speak with the host's kernel."""
        return {"key": self.keys["key"], "curve": self.keys["curve_publickey"]}


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
