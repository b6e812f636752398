"""The first process of a host on this machine's own kernel: a Docker container's, or just one.

    python3 -m rdmalab.lodger '{"spec": {...}, "call": PATH, "home": PATH, "port": 1, "alone": 1}'

It calls the lab's steward at the socket ``call``, is given the listening sockets of its kernel's
channels, imports what a kernel needs, and is then what every host's first process is
(:class:`~rdmalab.hostinit.HostInit`). It ends when the steward does.
"""

from __future__ import annotations

import gc
import json
import socket
import sys
import traceback
from typing import NoReturn

from .hostlink import CHANNELS
from .network import HostSpec

__all__ = ["main"]

TOLD = 3000  # characters of what went wrong


def main(order: str) -> NoReturn:
    """Become the host that the order tells of."""
    facts = json.loads(order)
    steward = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    steward.connect(facts["call"])
    try:
        become(HostSpec(**facts["spec"]), facts, steward)
    except BaseException:  # nobody sees a container's own complaints: the engine removes it
        detail = traceback.format_exc()[-TOLD:]
        steward.send(json.dumps({"event": "failed", "detail": detail}).encode())
        raise


def become(spec: HostSpec, facts: dict[str, str], steward: socket.socket) -> NoReturn:
    """Everything that can go wrong once there is somebody to tell."""
    from .hostinit import HostInit
    from .lodging import Lodging
    from .nursery import preload

    _, fds, _, _ = socket.recv_fds(steward, 64, len(CHANNELS))
    listeners = {name: socket.socket(fileno=fd) for name, fd in zip(CHANNELS, fds, strict=True)}
    preload(graded=False)
    gc.collect()
    gc.freeze()
    house = Lodging(spec, facts["home"], int(facts["port"]), bool(facts["alone"]))
    HostInit(spec, steward, listeners, house).main()


if __name__ == "__main__":
    main(sys.argv[1])
