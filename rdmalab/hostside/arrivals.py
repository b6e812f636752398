"""Completions as they arrive: every one is looked at, none waits without a deadline."""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import pyverbs.enums as e

from .ledger import Completion, Ledger
from .mishaps import CompletionError, WaitTimeout

__all__ = ["Arrivals"]

BATCH = 16  # completions of one poll
SETTLE_S = 0.05  # after an error: how long the flushes that follow it may take


class Arrivals:
    """The completions of one endpoint, in order, each with what its order was.

    ``cqs`` are the two completion queues by name (``send``, ``recv``), ``situation`` says in words
    how things stand, for the error of a wait that has waited long enough.
    """

    def __init__(self, cqs: dict[str, Any], ledger: Ledger, situation: Callable[[], str]) -> None:
        self.cqs, self.ledger, self.situation = cqs, ledger, situation
        self.ready: dict[str, deque[Completion]] = {name: deque() for name in cqs}

    def wait(self, n: int, timeout_s: float, queue: str | None) -> list[Completion]:
        """The next ``n`` completions of one queue, or of both. Raises if one tells of an error."""
        done: list[Completion] = []
        end = time.monotonic() + timeout_s
        while True:
            self.collect()
            if self.take(done, n, queue):
                return done
            if time.monotonic() > end:
                raise WaitTimeout(
                    f"{len(done)} of {n} completions came within {timeout_s:g} s."
                    f" {self.situation()}"
                )
            os.sched_yield()  # the device is software, and needs this processor, too

    def take(self, done: list[Completion], n: int, queue: str | None) -> bool:
        """Move what is ready into ``done``, up to ``n``; True if that many are there."""
        for name in self.ready if queue is None else (queue,):
            while self.ready[name] and len(done) < n:
                done.append(self.ready[name].popleft())
                if not done[-1].ok:
                    self.fail(done)
        return len(done) == n

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
            operation=order.operation if order else "unknown",
            status=e.ibv_wc_status(wc.status).name,
            queue=queue,
            byte_len=length if good else None,
            imm=socket.ntohl(wc.imm_data) if with_imm else None,
            offset=order.offset if order else None,
            qp_num=wc.qp_num,
            vendor_err=wc.vendor_err,
        )

    def fail(self, done: list[Completion]) -> None:
        """Collect the flushes that follow an error, and raise it with its cause."""
        end = time.monotonic() + SETTLE_S
        while self.collect() or time.monotonic() < end:
            os.sched_yield()
        bad = [completion for completion in done if not completion.ok]
        for backlog in self.ready.values():
            bad += [completion for completion in backlog if not completion.ok]
            backlog.clear()
        cause = next((completion for completion in bad if not completion.flushed), bad[0])
        flushed = [completion for completion in bad if completion is not cause]
        text = f"{cause.operation} (wr_id {cause.wr_id}) ended with {cause.status}."
        if flushed:
            text += f" (+{len(flushed)} flushed because of it)"
        good = [completion for completion in done if completion.ok]
        raise CompletionError(text, cause, flushed, good)

    def drop(self) -> None:
        """Take out and forget whatever is left: the queue pair has been reset."""
        self.collect()
        for backlog in self.ready.values():
            backlog.clear()
        self.ledger.forget()
