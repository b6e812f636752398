"""One host's kernel as the notebook sees it: run code, stream output, stop it, move data.

One request at a time runs on a host; whoever holds its lock owns the shell channel. Every wait
has a deadline, and the kernel's death is told by the guest, not guessed from silence.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from .channels import Channels, Inbox, Message
from .errors import BackendError, HostBusy, HostDied, HostError, HostTimeout, remote_error
from .hostside.values import pack, unpack
from .remote import SLICE_S, Remote, lab_gone
from .verdicts import Judged

__all__ = ["DEFAULT_TIMEOUT_S", "HostKernel", "why_died"]

DEFAULT_TIMEOUT_S = 60.0
INTERRUPT_GRACE_S = 5.0  # then the kernel is replaced: it is stuck in a call that never returns
BACK_S = 30.0  # how long a kernel that died is waited for
SYNC_S = 0.5  # for the first question to a kernel; doubled each time that no answer comes
SYNC_LEAST_S = 5.0  # a kernel that is free answers in this time, whatever else the machine does
REPLY_S = 10.0
OnOutput = Callable[[Message], None]


def why_died(event: dict[str, Any], memory_mib: int) -> str:
    """A kernel's end in words: out of memory, a signal with its usual cause, or an exit."""
    code = event.get("code")
    if event.get("restarted"):
        return "was restarted while this ran"
    if event.get("oom"):
        return f"ran out of memory: all its processes together may use {memory_mib} MiB"
    if isinstance(code, int) and code < 0:
        name = signal.Signals(-code).name
        if -code in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT):
            return (
                f"crashed ({name}) inside a library, as happens when a verbs object is used after"
                " it was closed, or None is passed where libibverbs needs an object"
            )
        return f"was ended by {name}"
    return f"ended by itself with exit code {code}" if code is not None else "is gone"


class HostKernel(Judged):
    """The connection to one host's kernel. ``facts``: the host's entry in the lab's state."""

    def __init__(self, remote: Remote, facts: dict[str, Any], memory_mib: int) -> None:
        self.remote, self.facts, self.name = remote, facts, str(facts["name"])
        self.memory_mib = memory_mib
        self.lock = threading.RLock()
        self.running_since = 0.0
        self._synced = False
        self._back = threading.Event()
        self._lost: Message | None = None  # a death that no request has told of yet
        self._channels = Channels(self.name, facts["kernel"])
        remote.listen(self._on_event)

    def close(self) -> None:
        """Drop the connection; the kernel runs on. May be called twice."""
        self._channels.close()

    # --- running code -----------------------------------------------------------------------

    def run(
        self,
        code: str,
        *,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        on_output: OnOutput | None = None,
        store_history: bool = True,
    ) -> None:
        """Run code on the host; returns when it is done. ``timeout_s=None``: no deadline.

        ``on_output`` gets the Jupyter messages of its output as they come. Raises what the host
        raised (:class:`~rdmalab.errors.RemoteError`), ``HostTimeout``, ``HostDied``, ``HostBusy``,
        ``LabGone``, and KeyboardInterrupt when this process is interrupted; in each case the host
        is idle again, or has a fresh kernel.
        """
        content = {
            "code": code,
            "silent": False,
            "store_history": store_history,
            "user_expressions": {},
            "allow_stdin": False,
            "stop_on_error": False,  # an error here must not abort what others have in the queue
        }
        reply = self.request("execute_request", content, [], timeout_s, on_output)["content"]
        if reply["status"] != "ok":
            raise remote_error(
                self.name,
                reply.get("ename", "Aborted"),
                reply.get("evalue", "the host did not run this"),
                reply.get("traceback", []),
            )

    def get(self, name: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> Any:
        """A variable's value. Remote errors NameError or TypeError if it cannot be had."""
        reply = self.request("rdmalab_get_request", {"name": name}, [], timeout_s, None)
        content = reply["content"]
        if content["status"] != "ok":
            raise remote_error(self.name, content["ename"], content["evalue"], [])
        return unpack(content, reply["buffers"])

    def put(self, name: str, value: Any, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Set a variable on the host. ``TypeError`` here for what is no plain data."""
        content, buffers = pack(value)
        self.request("rdmalab_put_request", {**content, "name": name}, buffers, timeout_s, None)

    def request(
        self,
        kind: str,
        content: Message,
        buffers: list[bytes],
        timeout_s: float | None,
        on_output: OnOutput | None,
    ) -> Message:
        """One request on the shell channel and its reply, with the output in between."""
        with self.turn(timeout_s):
            if self._lost is not None:
                raise self._died(self._lost)
            self._sync(timeout_s)
            with self._channels.ask(kind, content, buffers) as (ident, inbox):
                try:
                    self._until_idle(inbox, timeout_s, on_output)
                except (HostDied, BackendError):
                    raise
                except BaseException as error:  # an error in on_output included
                    self._stop(inbox, on_output, error)
                    raise
            reply = self._channels.reply(ident, REPLY_S)
        if reply is None:
            raise HostTimeout(self.name, "finished, but its reply is lost.", next_step="Try again.")
        return reply

    @contextlib.contextmanager
    def turn(self, timeout_s: float | None) -> Iterator[None]:
        """Hold the host for one request; :class:`HostBusy` if it is not free in time."""
        end = time.monotonic() + (timeout_s if timeout_s is not None else 3600.0)
        while not self.lock.acquire(timeout=SLICE_S):
            if not self.remote.state.alive():
                raise lab_gone(self.remote.state)
            if time.monotonic() > end:
                busy_s = time.monotonic() - self.running_since
                raise HostBusy(
                    self.name,
                    f"is still busy with something else (for {busy_s:.0f} s).",
                    next_step=f"Wait for it with %wait {self.name}, or stop it:"
                    f" lab.{self.name}.interrupt()",
                )
        self.running_since = time.monotonic()
        try:
            yield
        finally:
            self.lock.release()

    def _until_idle(
        self, inbox: Inbox, timeout_s: float | None, on_output: OnOutput | None
    ) -> None:
        """Hand output on until the kernel says that it is idle again."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = SLICE_S if end is None else end - time.monotonic()
            if left <= 0:
                raise HostTimeout(
                    self.name,
                    f"did not finish within {timeout_s:g} s; it was interrupted.",
                    next_step="Give it more time (%%on HOST --timeout SECONDS), or look what it"
                    " waits for: a completion that never comes, a peer that has posted no receive?",
                )
            try:
                message = inbox.get(timeout=min(SLICE_S, left))
            except queue.Empty:
                if not self.remote.state.alive():
                    raise lab_gone(self.remote.state) from None
                continue
            kind = message["msg_type"]
            if kind == "died":
                raise self._died(message)
            if kind == "closed":
                raise BackendError(f"The connection to {self.name} was closed while this ran.")
            if kind == "status":
                if message["content"]["execution_state"] == "idle":
                    return
            elif on_output is not None:
                on_output(message)

    def _died(self, event: Message) -> HostDied:
        """The error for a kernel that ended, made when its successor is there."""
        failed = event.get("state") == "failed"  # the host, and not only its kernel
        self._synced, self._lost, self.secret = False, event if failed else None, None
        if failed:
            then = "The host itself has ended, for good: rdmalab down, then rdmalab up."
        elif self._back.wait(BACK_S):
            then = "A fresh one is running: its variables and RDMA objects are gone, so run the"
            then += " cells that made them again."
        else:
            then = f"It did not come back; try lab.{self.name}.restart()."
        died = f"The kernel {why_died(event, self.memory_mib)}."
        return HostDied(self.name, died, next_step=then)

    def _stop(self, inbox: Inbox, on_output: OnOutput | None, error: BaseException) -> None:
        """Interrupt what runs; replace the kernel if it does not react."""
        if not isinstance(error, (KeyboardInterrupt, HostTimeout)):
            on_output = None  # it is what failed
        self.interrupt()
        try:
            self._until_idle(inbox, INTERRUPT_GRACE_S, on_output)
        except HostTimeout:
            self.restart()
            note = f"[{self.name}] did not react to the interrupt; it has a fresh kernel now."
            if isinstance(error, HostTimeout):
                error.what += f" {note}"
            elif on_output is not None:
                on_output(
                    {"msg_type": "stream", "content": {"name": "stdout", "text": note + "\n"}}
                )
        except HostDied:
            pass  # it is fresh already, which is what stopping wants

    def _sync(self, timeout_s: float | None) -> None:
        """Make sure once per kernel that its output reaches us: a first question and its echo.

        The first may come before our subscription, and is asked again. On a busy machine answers
        are late, and asking ever more would make them later still. They are as late from a kernel
        that works for another notebook, or has not ended what this one began before its restart.
        """
        begin, patience_s = time.monotonic(), SYNC_S
        timeout_s = 3600.0 if timeout_s is None else max(timeout_s, SYNC_LEAST_S)
        while not self._synced:
            with self._channels.ask("kernel_info_request", {}, []) as (ident, inbox):
                try:
                    self._until_idle(inbox, patience_s, None)
                    self._synced = self._channels.reply(ident, patience_s) is not None
                except HostTimeout:
                    waited_s = time.monotonic() - begin
                    if waited_s > timeout_s:
                        raise HostBusy(
                            self.name,
                            f"is at work for another notebook (or for this one, from before it was"
                            f" restarted), or hangs: no answer for {waited_s:.0f} s.",
                            next_step=f"Wait for it, or stop it: lab.{self.name}.interrupt(); if"
                            f" that does not help, lab.{self.name}.restart()",
                        ) from None
                    patience_s = min(2 * patience_s, max(timeout_s - waited_s, SYNC_S))

    # --- control ----------------------------------------------------------------------------

    def interrupt(self) -> None:
        """Send SIGINT to the kernel: Python raises KeyboardInterrupt, a blocked call returns."""
        self.remote.call("interrupt", host=self.name)

    def restart(self, timeout_s: float = 90.0) -> None:
        """Replace the kernel; memory, queue pairs and processes of the old one are freed."""
        self._synced, self._lost, self.secret = False, None, None
        self.remote.call("restart", host=self.name, timeout_s=timeout_s)

    def complete(self, code: str, cursor: int, timeout_s: float = 1.0) -> Message | None:
        """Completions on the host, or None if it is busy or does not answer in time."""
        return self.ask("complete_request", {"code": code, "cursor_pos": cursor}, timeout_s)

    def ask(self, kind: str, content: Message, timeout_s: float) -> Message | None:
        """What the kernel replies to a question in between, or None if it has no time for it.

        Nothing is interrupted or restarted for it; a death is left for the next request to tell.
        """
        if not self.lock.acquire(blocking=False):
            return None
        try:
            self._sync(timeout_s)
            with self._channels.ask(kind, content, []) as (ident, inbox):
                reply = self._channels.reply(ident, timeout_s)
                while reply is None and not inbox.empty():
                    message = inbox.get_nowait()
                    self._lost = message if message["msg_type"] == "died" else self._lost
            return None if reply is None else dict(reply["content"])
        except HostError:
            return None
        finally:
            self.lock.release()

    def _on_event(self, event: dict[str, Any]) -> None:
        """The guest says that a kernel died or is back; called in the remote's thread."""
        if event.get("host") != self.name:
            return
        if event["state"] == "ready":
            self._back.set()
            return
        self._back.clear()
        self._synced, self.secret = False, None
        told = self._channels.tell_all({"msg_type": "died", **event})
        if not told and not event.get("restarted"):
            self._lost = event
