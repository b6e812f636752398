"""The controller's side of the guest's control service: requests, streams, events.

One background thread per lab and process owns the socket; callers wait on queues, so every wait has
a deadline, can be interrupted, and ends early when the lab's virtual machine does.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import zmq

from . import limits
from .console import said_in
from .errors import BackendError, LabGone
from .state import LabState, lab_folder

__all__ = ["Command", "Remote", "lab_gone"]

Frame = tuple[dict[str, Any], bytes]
SLICE_S = 0.25  # how often a wait looks whether the lab is still there


def url(way: dict[str, Any]) -> str:
    """A ZeroMQ address from ip, port and, where it is a Unix socket, ``transport``: as Jupyter."""
    form = "ipc://{ip}-{port}" if way.get("transport") == "ipc" else "tcp://{ip}:{port}"
    return form.format(**way)


def lab_gone(state: LabState) -> LabGone:
    """The error for a lab whose process ended; with the reason if its machine has told one.

    A machine that was killed has told none: the last lines of its console are about other things.
    """
    said = said_in(lab_folder(state.lab))
    told = said.panicked or said.qemu
    words = said.shown() + said.keep(f"gone-{state.lab}-{state.pid}") if told else limits.kills()
    process = "virtual machine" if state.backend == "vm" else "steward"
    return LabGone(
        f"The lab {state.lab!r} is gone: its {process} (pid {state.pid}) has ended.{words}",
        next_step="`rdmalab up`, or lab = rdmalab.up() in a notebook, starts the hosts afresh.",
    )


class Remote:
    """A connection to one lab's control service. A context manager; may be closed twice."""

    def __init__(self, state: LabState) -> None:
        self.state = state
        self._ids = itertools.count(1)
        self._inboxes: dict[int, queue.SimpleQueue[Frame]] = {}
        self._listeners: list[Callable[[dict[str, Any]], None]] = []
        self._context = zmq.Context()
        self._out = self._context.socket(zmq.PAIR)
        self._out.bind("inproc://out")
        self._lock = threading.Lock()
        self._closed = False
        ready = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(ready,), name=f"rdmalab-{state.lab}", daemon=True
        )
        self._thread.start()
        ready.wait(5)

    def __enter__(self) -> Remote:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread and the connection."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._out.send(b"")
        self._thread.join(5)
        self._out.close(linger=0)
        self._context.term()

    def listen(self, callback: Callable[[dict[str, Any]], None]) -> None:
        """Hear events (``{"event": "kernel", "host": ..., "state": ...}``), in the thread."""
        self._listeners.append(callback)

    def call(self, op: str, *, timeout_s: float = 10.0, **args: Any) -> dict[str, Any]:
        """One request and its answer. Raises :class:`BackendError` with what the guest says."""
        with self._conversation() as (ident, inbox):
            self._send({"id": ident, "op": op, **args})
            answer, _ = self.receive(inbox, timeout_s, f"the lab's answer to {op!r}")
        if "error" in answer:
            raise BackendError(f"The lab refused {op!r}: {answer['error']}.")
        return answer

    def stream(
        self, op: str, argv: list[str], *, timeout_s: float | None = None, **args: Any
    ) -> Iterator[tuple[str, bytes] | int]:
        """Run a command: yields (``stdout`` or ``stderr``, data) pairs and, last, its exit code.

        When the caller stops early (an error, Ctrl-C, closing the generator), the command is
        ended: SIGINT, and SIGKILL a second later.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        with self._conversation() as (ident, inbox):
            self._send({"id": ident, "op": op, "argv": argv, **args})
            try:
                while True:
                    left = 3600.0 if end is None else max(0.0, end - time.monotonic())
                    content, data = self.receive(inbox, left, f"{argv[0]} to end")
                    if "error" in content:
                        raise BackendError(f"The lab refused to run {argv[0]}: {content['error']}.")
                    if "exit" in content:
                        yield int(content["exit"])
                        return
                    self._send({"id": None, "op": "ack", "target": ident, "size": len(data)})
                    yield content["stream"], data
            except BaseException:
                self._end_command(ident, inbox)
                raise

    @contextlib.contextmanager
    def start(self, op: str, argv: list[str], **args: Any) -> Iterator[Command]:
        """A command that runs beside the block; ended at the block's end, if it has not by itself.

        Somebody has to keep reading its output: a command that is not listened to is paused.
        """
        with self._conversation() as (ident, inbox):
            self._send({"id": ident, "op": op, "argv": argv, **args})
            command = Command(self, ident, inbox)
            try:
                yield command
            finally:
                if command.code is None:
                    self._end_command(ident, inbox)

    def run(self, op: str, argv: list[str], *, timeout_s: float = 30.0, **args: Any) -> str:
        """A command's standard output; :class:`BackendError` with its error text if it fails."""
        parts: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
        code = 0
        for item in self.stream(op, argv, timeout_s=timeout_s, **args):
            if isinstance(item, int):
                code = item
            else:
                parts[item[0]].append(item[1])
        if code:
            said = b"".join(parts["stderr"]).decode(errors="replace").strip()
            raise BackendError(f"{' '.join(argv)} failed in the lab (exit {code}): {said}")
        return b"".join(parts["stdout"]).decode(errors="replace")

    def receive(self, inbox: queue.SimpleQueue[Frame], timeout_s: float, what: str) -> Frame:
        """The next frame of a conversation, or an error that says what was waited for."""
        end = time.monotonic() + timeout_s
        while True:
            left = end - time.monotonic()
            try:
                return inbox.get(timeout=max(0.0, min(SLICE_S, left)))
            except queue.Empty:
                if not self.state.alive():
                    raise lab_gone(self.state) from None
                if left <= 0:
                    raise BackendError(
                        f"Waited {timeout_s:.0f} s for {what}.",
                        next_step="If the hosts hang: rdmalab down, then rdmalab up.",
                    ) from None

    def _conversation(self) -> _Conversation:
        return _Conversation(self._inboxes, next(self._ids))

    def _send(self, request: dict[str, Any]) -> None:
        with self._lock:
            if self._closed:
                raise BackendError("This connection to the lab is closed.")
            self._out.send(json.dumps(request).encode())

    def _end_command(self, ident: int, inbox: queue.SimpleQueue[Frame]) -> None:
        """SIGINT, then SIGKILL, to a command whose caller has had enough; bounded in time."""
        for signum, patience_s in ((2, 1.0), (9, 1.0)):
            try:
                self._send({"id": None, "op": "signal", "target": ident, "signal": signum})
                end = time.monotonic() + patience_s
                while time.monotonic() < end:
                    if "exit" in self.receive(inbox, end - time.monotonic(), "")[0]:
                        return
            except BackendError:
                continue

    def _run(self, ready: threading.Event) -> None:
        """The thread: moves frames between the callers' queues and the guest."""
        wire = self._context.socket(zmq.DEALER)
        public, secret = zmq.curve_keypair()
        wire.curve_publickey, wire.curve_secretkey = public, secret
        wire.curve_serverkey = self.state.control["curve"].encode()
        wire.setsockopt(zmq.LINGER, 0)
        wire.setsockopt(zmq.RCVHWM, 0)
        wire.connect(url(self.state.control))
        todo = self._context.socket(zmq.PAIR)
        todo.connect("inproc://out")
        ready.set()
        poller = zmq.Poller()
        poller.register(wire, zmq.POLLIN)
        poller.register(todo, zmq.POLLIN)
        while True:
            for source, _ in poller.poll():
                frames = source.recv_multipart()
                if source is wire:
                    self._deliver(json.loads(frames[0]), b"".join(frames[1:]))
                elif frames == [b""]:
                    wire.close()
                    todo.close()
                    return
                else:
                    wire.send_multipart(frames)

    def _deliver(self, content: dict[str, Any], data: bytes) -> None:
        inbox = self._inboxes.get(content.get("id") or 0)
        if inbox is not None:
            inbox.put((content, data))
        elif "event" in content:
            for callback in list(self._listeners):
                callback(content)


class Command:
    """A command in the guest, from :meth:`Remote.start`. ``code``: how it ended, or None."""

    def __init__(self, remote: Remote, ident: int, inbox: queue.SimpleQueue[Frame]) -> None:
        self._remote, self._ident, self._inbox = remote, ident, inbox
        self.code: int | None = None

    def read(self, timeout_s: float) -> tuple[str, bytes] | None:
        """The next (``stdout`` or ``stderr``, data); None when nothing came, or when it has ended.

        Raises :class:`LabGone`, and :class:`BackendError` if the guest did not run it.
        """
        end = time.monotonic() + timeout_s
        while self.code is None:
            try:
                content, data = self._inbox.get(
                    timeout=max(0.0, min(SLICE_S, end - time.monotonic()))
                )
            except queue.Empty:
                if not self._remote.state.alive():
                    raise lab_gone(self._remote.state) from None
                if time.monotonic() >= end:
                    return None
                continue
            if "error" in content:
                self.code = -1
                raise BackendError(f"The lab refused to run a command: {content['error']}.")
            if "exit" in content:
                self.code = int(content["exit"])
                return None
            ack = {"op": "ack", "target": self._ident, "size": len(data)}
            self._remote._send({"id": None, **ack})
            return content["stream"], data
        return None

    def signal(self, signum: int) -> None:
        """A signal to the command."""
        self._remote._send(
            {"id": None, "op": "signal", "target": self._ident, "signal": int(signum)}
        )


class _Conversation:
    """An id and a queue for its answers, forgotten at the end."""

    def __init__(self, inboxes: dict[int, queue.SimpleQueue[Frame]], ident: int) -> None:
        self.inboxes, self.ident = inboxes, ident

    def __enter__(self) -> tuple[int, queue.SimpleQueue[Frame]]:
        inbox = self.inboxes[self.ident] = queue.SimpleQueue()
        return self.ident, inbox

    def __exit__(self, *exc: object) -> None:
        del self.inboxes[self.ident]
