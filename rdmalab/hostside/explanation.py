"""What an endpoint does, as one page of raw pyverbs: the text of :meth:`Endpoint.explain`.

It is made of the source of the functions that the endpoint itself calls, so it cannot drift from
them; ``plain_endpoint`` shows them in their order, and a test runs the printed page.
"""

from __future__ import annotations

import inspect
import os
import re
import time
from collections.abc import Callable
from typing import Any

import pyverbs.enums as e
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD

from . import here, orders
from .bringup import make_completion_queue, make_queue_pair, to_init, to_rtr, to_rts
from .card import Card, fit

__all__ = ["page"]

IMPORTS = """\
import os
import socket
import time

import pyverbs.enums as e
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ, CompChannel
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR
from rdmalab import here
from rdmalab.card import Card, fit  # the visiting card, and the smaller of what both sides can
"""


def plain_endpoint(swap: Callable[[Card], Card]) -> tuple[Any, ...]:
    """All steps of ``Endpoint()`` and ``connect()``; ``swap`` gives our card for the peer's."""
    ctx = Context(name=here.device)
    pd = PD(ctx)
    scq, scq_channel = make_completion_queue(ctx, 64)
    rcq, rcq_channel = make_completion_queue(ctx, 64)
    remote = e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ | e.IBV_ACCESS_REMOTE_ATOMIC
    mr = MR(pd, 4096, e.IBV_ACCESS_LOCAL_WRITE | remote)
    qp = make_queue_pair(pd, scq, rcq, 64, 0)
    path_mtu = 128 << ctx.query_port(here.port).active_mtu  # bytes
    mine = Card(here.name, here.gid, qp.qp_num, 1000, path_mtu, 16, 16, mr.buf, 4096, mr.rkey)
    peer = swap(mine)
    agreed = fit(mine, peer)
    to_init(qp, remote)
    to_rtr(qp, peer, agreed, here.gid_index, 12)
    to_rts(qp, mine.psn, agreed, 14, 6, 6)
    return qp, scq, rcq, mr, peer, (ctx, pd, scq_channel, rcq_channel)


def plain_wait(cq: Any, seconds: float = 5.0) -> Any:
    """The next completion, by polling."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        count, completions = cq.poll(16)
        if count:
            return completions
        os.sched_yield()  # the device is software, and needs this processor, too
    raise TimeoutError(f"no completion within {seconds} s")


PIECES: tuple[Any, ...] = (
    make_completion_queue,
    make_queue_pair,
    to_init,
    to_rtr,
    to_rts,
    plain_endpoint,
    orders.recv_request,
    orders.send_request,
    plain_wait,
)
HINTS = (
    (r"modify\(qp, attr, mask\)", "qp.modify(attr, mask)"),
    (r"\) -> [^:]*:\n", "):\n"),
    (r"(\w+): float = ", r"\1="),
    (r"(\w+): (?:Any|int|float|Card \| None|Card|Fit|Order|Callable\S* Card\])", r"\1"),
)


def page() -> str:
    """The page: imports, then each function, without the types that only checkers need."""
    parts = [IMPORTS]
    for piece in PIECES:
        source = inspect.getsource(piece)
        head, colon, body = source.partition('"""')
        for pattern, plain in HINTS[1:]:
            head = re.sub(pattern, plain, head)
        parts.append(re.sub(*HINTS[0], head + colon + body))
    return "\n\n".join(parts)
