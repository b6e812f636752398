"""Completions as they arrive: every one is looked at, and no wait is without a deadline."""

from __future__ import annotations

import itertools
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyverbs.enums as e

from . import reasons
from .ledger import Completion, Ledger
from .mishaps import CompletionError, EndpointError, WaitTimeout
from .patience import rest
from .statuses import status_name

__all__ = ["Arrivals", "event_files", "event_names"]

BATCH = 16  # completions of one poll
SPINS = 20  # empty polls of both queues before the first nap
SETTLE_S = 0.05  # after an error: how long the flushes that follow it may take


class Arrivals:
    """The completions of one endpoint, in order, each with what its order was.

    ``cqs`` and ``channels`` are completion queues and their channels by name (``send``, ``recv``),
    ``files`` the descriptors of the channels, ``situation`` tells how the endpoint stands.
    """

    def __init__(
        self, cqs: dict[str, Any], channels: dict[str, Any], files: dict[str, int], ledger: Ledger
    ) -> None:
        self.cqs, self.channels, self.files, self.ledger = cqs, channels, files, ledger
        self.ready: dict[str, deque[Completion]] = {name: deque() for name in cqs}
        self.first_failure: Completion | None = None  # since the connection began

    # ------------------------------------------------------------ waiting

    def wait(
        self, n: int, timeout_s: float, queue: str | None, look: Callable[[], reasons.Situation]
    ) -> list[Completion]:
        """The next ``n`` completions, by polling."""
        done: list[Completion] = []
        end = time.monotonic() + timeout_s
        for polls in itertools.count():
            self.collect()
            if self.take(done, n, queue, look):
                break
            if time.monotonic() > end:
                raise self.late(done, n, timeout_s, queue, look)
            rest(polls, SPINS)
        return done

    def wait_event(
        self, n: int, timeout_s: float, queue: str | None, look: Callable[[], reasons.Situation]
    ) -> list[Completion]:
        """As ``wait``, but asleep until the device tells that something has come.

        The order matters. *Arm* first, then *poll*: what came before the arming gives no event.
        Then *wait*, *acknowledge* the event (or closing the queue would wait for it), and *drain*:
        one event may stand for many completions.
        """
        done: list[Completion] = []
        end = time.monotonic() + timeout_s
        names = list(self.cqs) if queue is None else [queue]
        while True:
            for name in names:
                self.cqs[name].req_notify()
            self.collect()
            if self.take(done, n, queue, look):
                return done
            left = end - time.monotonic()
            if left <= 0:
                raise self.late(done, n, timeout_s, queue, look)
            awake, _, _ = select.select([self.files[name] for name in names], [], [], left)
            for name in names:
                if self.files[name] in awake:
                    self.channels[name].get_cq_event(self.cqs[name])
                    self.cqs[name].ack_events(1)

    def wait_for(
        self, wr_id: int, look: Callable[[], reasons.Situation], timeout_s: float = 5.0
    ) -> None:
        """Wait for one order of the send queue; what else completes there stays to be taken."""
        end = time.monotonic() + timeout_s
        backlog = self.ready["send"]
        for polls in itertools.count():
            self.collect()
            if not all(completion.ok for completion in backlog):
                self.take([], len(backlog), "send", look)
            mine = next((found for found in backlog if found.wr_id == wr_id), None)
            if mine is not None:
                backlog.remove(mine)
                return
            if time.monotonic() > end:
                raise self.late([], 1, timeout_s, "send", look)
            rest(polls, SPINS)

    def late(
        self,
        done: list[Completion],
        n: int,
        timeout_s: float,
        queue: str | None,
        look: Callable[[], reasons.Situation],
    ) -> EndpointError:
        """The error for a wait that has waited long enough; what came stays to be taken."""
        now = look()
        self.collect()
        if any(not late.ok for name in self.ready for late in self.ready[name]):
            return self.failure(done, look)  # it failed at the very last moment
        came = len(done)
        for completion in reversed(done):
            self.ready[completion.queue].appendleft(completion)
        return WaitTimeout(reasons.nothing_came(self.ledger, came, n, timeout_s, queue, now))

    # ------------------------------------------------------------ taking

    def collect(self) -> int:
        """Poll both queues until they are empty; how many completions there were."""
        found = 0
        for name, cq in self.cqs.items():
            while True:
                count, completions = cq.poll(BATCH)
                self.ready[name].extend(self.read(name, wc) for wc in completions)
                found += count
                if count < BATCH:
                    break
        return found

    def read(self, queue: str, wc: Any) -> Completion:
        """What a completion says, with what our ledger knows about its order."""
        order = self.ledger.settle(queue, wc.wr_id)
        good = wc.status == e.IBV_WC_SUCCESS
        with_imm = good and queue == "recv" and wc.wc_flags & e.IBV_WC_WITH_IMM
        length = wc.byte_len if queue == "recv" else order.length if order else None
        return Completion(
            wr_id=wc.wr_id,
            operation=order.operation if order else "an order of your own",
            status=status_name(wc.status),
            byte_len=length if good else None,
            imm=socket.ntohl(wc.imm_data) if with_imm else None,
            queue=queue,
            offset=order.offset if order else None,
            qp_num=wc.qp_num,
            vendor_err=wc.vendor_err,
        )

    def take(
        self,
        done: list[Completion],
        n: int,
        queue: str | None,
        look: Callable[[], reasons.Situation],
    ) -> bool:
        """Move what is ready into ``done``, up to ``n``; True if that many are there."""
        for name in self.ready if queue is None else (queue,):
            backlog = self.ready[name]
            while backlog and len(done) < n:
                done.append(backlog.popleft())
                if not done[-1].ok:
                    raise self.failure(done, look)
        return len(done) >= n

    def failure(
        self, done: list[Completion], look: Callable[[], reasons.Situation]
    ) -> CompletionError:
        """Collect the flushes that follow an error; the error with its first real cause."""
        end = time.monotonic() + SETTLE_S
        while self.collect() or time.monotonic() < end:
            os.sched_yield()
        bad = [completion for completion in done if not completion.ok]
        good = [completion for completion in done if completion.ok]
        for backlog in self.ready.values():
            bad += [completion for completion in backlog if not completion.ok]
            good += [completion for completion in backlog if completion.ok]
            backlog.clear()
        cause = next((completion for completion in bad if not completion.flushed), bad[0])
        flushed = [completion for completion in bad if completion is not cause]
        text = reasons.failed(cause, flushed, look(), self.first_failure)
        self.first_failure = self.first_failure or cause
        return CompletionError(text, cause, flushed, good)

    def drop(self) -> None:
        """Take out and forget whatever is left: the queue pair has been reset."""
        self.collect()
        for backlog in self.ready.values():
            backlog.clear()
        self.ledger.forget()
        self.first_failure = None


# ---------------------------------------------------------------- events


def event_files() -> set[int]:
    """This process's descriptors from which the device's events are read."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if entry.readlink().name == "anon_inode:[infinibandevent]":
                found.add(int(entry.name))
        except OSError:
            continue  # the folder's own descriptor, gone by now
    return found


def event_names(ctx: Any, file: int) -> list[str]:
    """The device's events that have not been read yet; never waits."""
    names = []
    read = ctx.get_async_event  # of an open context: a closed one's descriptor may be another's now
    while select.select([file], [], [], 0)[0]:
        event = read()
        names.append(e.ibv_event_type(event.event_type).name)
        event.ack()  # or closing the object that it tells of would wait for it
    return names
