"""The Jupyter channels to one host's kernel: requests out, output always drained.

A thread reads the output channel whether or not somebody waits, so nothing is lost and the kernel
is never held up; each message goes to the inbox of the request that caused it. The shell channel
belongs to one caller at a time (see ``HostKernel``).
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .errors import BackendError

if TYPE_CHECKING:
    from jupyter_client.blocking.client import BlockingKernelClient

__all__ = ["Channels", "Inbox", "Message"]

Message = dict[str, Any]
Inbox = queue.SimpleQueue[Message]
POLL_MS = 200
MESSAGE_BYTES = 64 << 20  # at most; what sends a larger one is cut off


def connect(kernel: dict[str, Any]) -> BlockingKernelClient:
    """A jupyter_client on the kernel's ports, with its key and CurveZMQ's."""
    import zmq
    from jupyter_client.blocking.client import BlockingKernelClient

    context = zmq.Context()  # what is set here holds for every socket made in it
    context.rcvhwm = context.sndhwm = context.linger = 0
    context.maxmsgsize = MESSAGE_BYTES
    context.curve_publickey, context.curve_secretkey = zmq.curve_keypair()
    context.curve_serverkey = kernel["curve"].encode()
    client = BlockingKernelClient(context=context)
    transport = kernel.get("transport", "tcp")
    info: dict[str, Any] = {"ip": kernel["ip"], "transport": transport, "key": kernel["key"]}
    info |= {f"{name}_port": port for name, port in kernel["ports"].items()}
    client.load_connection_info(info)  # type: ignore[arg-type] # a TypedDict of these very keys
    client.start_channels(shell=True, iopub=True, stdin=False, hb=False, control=False)
    return client


class Channels:
    """Shell and output channel of one kernel. ``kernel``: its keys and ports, from the state."""

    def __init__(self, name: str, kernel: dict[str, Any]) -> None:
        self._client = connect(kernel)
        self._inboxes: dict[str, Inbox] = {}
        self._closed = False
        self._shell = threading.Lock()  # held by whoever is at the shell channel's socket
        self._thread = threading.Thread(
            target=self._pump, name=f"rdmalab-output-{name}", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the thread and the connection; may be called twice."""
        if self._closed:
            return
        self._closed = True
        self.tell_all({"msg_type": "closed"})
        self._thread.join(5)
        with self._shell:
            self._client.stop_channels()
            self._client.context.destroy(linger=0)

    @contextlib.contextmanager
    def _shell_channel(self) -> Iterator[Any]:
        """The shell channel, which nobody closes meanwhile."""
        with self._shell:
            if self._closed:
                raise BackendError("This connection to the lab is closed.")
            yield self._client.shell_channel

    @contextlib.contextmanager
    def ask(self, kind: str, content: Message, buffers: list[bytes]) -> Iterator[tuple[str, Inbox]]:
        """Send a request on the shell channel; yields its id and the inbox for its output."""
        session = self._client.session
        message = session.msg(kind, content)
        ident: str = message["header"]["msg_id"]
        inbox: Inbox = queue.SimpleQueue()
        self._inboxes[ident] = inbox
        try:
            with self._shell_channel() as channel:
                session.send(channel.socket, message, buffers=buffers)
            yield ident, inbox
        finally:
            del self._inboxes[ident]

    def reply(self, ident: str, timeout_s: float) -> Message | None:
        """The reply to a request, or None; earlier requests' late replies are dropped."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            with self._shell_channel() as channel:
                if not channel.socket.poll(POLL_MS):
                    continue
                message: Message = channel.get_msg(timeout=0)
            if message["parent_header"].get("msg_id") == ident:
                return message
        return None

    def tell_all(self, message: Message) -> bool:
        """Put a message into every open inbox (the kernel died). False if there is none."""
        inboxes = list(self._inboxes.values())
        for inbox in inboxes:
            inbox.put(message)
        return bool(inboxes)

    def _pump(self) -> None:
        """Always drain the output channel; runs in its own thread."""
        channel = self._client.iopub_channel
        while not self._closed:
            if channel.socket.poll(POLL_MS):
                try:
                    message = channel.get_msg(timeout=0)
                except ValueError:
                    continue  # not signed with this lab's key
                inbox = self._inboxes.get(message["parent_header"].get("msg_id", ""))
                if inbox is not None:
                    inbox.put(message)
