"""The nursery: a process that has imported what a kernel needs and forks the hosts.

Importing IPython, numpy and pyverbs takes seconds under emulation, a fork milliseconds; and
what was imported before it is in memory once, however many hosts there are.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import socket
import sys
import traceback
from typing import NoReturn

from .hostlink import CHANNELS
from .network import HostSpec

__all__ = ["start_nursery"]

PRELOADED = (
    "numpy",
    *(f"pyverbs.{name}" for name in ("addr", "cq", "device", "mr", "pd", "qp", "wr")),
)


def nursery(channel: socket.socket) -> NoReturn:
    """Import what every kernel needs, once, then fork a host for each order of the agent."""
    from . import hostinit, hostkernel

    for name in PRELOADED:
        importlib.import_module(name)
    hostkernel.warm_up()
    gc.collect()
    gc.freeze()
    channel.send(b"ready")
    while True:
        data, fds, _, _ = socket.recv_fds(channel, 65536, 1 + len(CHANNELS))
        if not data:
            os._exit(0)
        order = json.loads(data)
        socks = [socket.socket(fileno=fd) for fd in fds]
        listeners = dict(zip(CHANNELS, socks[1:], strict=True))
        hostinit.become(HostSpec(**order["spec"]), socks[0], listeners)
        for sock in socks:
            sock.close()


def start_nursery() -> socket.socket:
    """Fork the nursery; it imports while the agent builds the network."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        try:
            ours.close()
            nursery(theirs)
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        os._exit(1)
    theirs.close()
    return ours
