"""Sockets of the lab's own: listening ones that somebody else has made, and CurveZMQ on them.

In the guest they are TCP sockets of the guest's network, which hosts have no way to. Where hosts
run on this machine's own kernel they are Unix sockets in the lab's 0700 folder: who is handed a
listening TCP socket could turn it around and walk out on this machine's network, and with a
listening Unix socket one can do nothing but listen (connect(2) on it is EINVAL).
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

import zmq

__all__ = ["EVERYBODY", "bind", "listen_at"]

EVERYBODY = 0o666  # who may connect is decided by the 0700 folder above


def listen_at(path: Path, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
    """A listening Unix socket."""
    sock = socket.socket(socket.AF_UNIX, kind)
    path.unlink(missing_ok=True)
    sock.bind(str(path))
    path.chmod(EVERYBODY)
    sock.listen(64)
    return sock


def bind(sock: zmq.Socket[bytes], fd: int, public: bytes, secret: bytes) -> None:
    """Bind a ZeroMQ socket with CurveZMQ on a listening socket, whose descriptor it takes over."""
    sock.curve_server = True
    sock.curve_publickey, sock.curve_secretkey = public, secret
    sock.setsockopt(zmq.USE_FD, fd)
    with socket.socket(fileno=os.dup(fd)) as listener:
        unix = listener.family == socket.AF_UNIX
    sock.bind("ipc://listening" if unix else "tcp://0.0.0.0:1")  # the address is the descriptor's
