"""One host's kernel as the notebook sees it: run code, stream output, stop it, move data.

A thread per host always drains the output channel and hands messages to whoever asked, so that
nothing is lost while nobody reads. The shell channel belongs to the caller that holds the
host's lock. The kernel's death is told by the guest, not guessed from silence.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from .errors import HostBusy, HostDied, HostTimeout, remote_error
from .hostside.values import pack, unpack
from .remote import SLICE_S, Remote, lab_gone

if TYPE_CHECKING:
    from jupyter_client.blocking.client import BlockingKernelClient

__all__ = ["DEFAULT_TIMEOUT_S", "HostKernel", "Job", "why_died"]

DEFAULT_TIMEOUT_S = 60.0
INTERRUPT_GRACE_S = 2.0  # then the kernel is replaced: it is stuck in a call that never returns
BACK_S = 15.0  # how long a kernel that died is waited for
SYNC_S = 0.5
Message = dict[str, Any]
OnOutput = Callable[[Message], None]


def why_died(event: dict[str, Any], memory_mib: int) -> str:
    """A kernel's end in words: out of memory, a signal with its usual cause, or an exit."""
    code = event.get("code")
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


class HostKernel:
    """The connection to one host's kernel. ``facts``: the host's entry in the lab's state."""

    def __init__(self, remote: Remote, facts: dict[str, Any], memory_mib: int) -> None:
        self.remote, self.facts, self.name = remote, facts, str(facts["name"])
        self.memory_mib = memory_mib
        self.lock = threading.RLock()
        self.running_since = 0.0
        self._waiters: dict[str, queue.SimpleQueue[Message]] = {}
        self._synced = False
        self._closed = False
        self._back = threading.Event()
        self._client = self._connect()
        remote.listen(self._on_event)
        self._pump_thread = threading.Thread(
            target=self._pump, name=f"rdmalab-output-{self.name}", daemon=True
        )
        self._pump_thread.start()

    def _connect(self) -> BlockingKernelClient:
        import zmq
        from jupyter_client.blocking.client import BlockingKernelClient

        kernel = self.facts["kernel"]
        context = zmq.Context()  # what is set here holds for every socket made in it
        context.rcvhwm = context.sndhwm = context.linger = 0
        context.curve_publickey, context.curve_secretkey = zmq.curve_keypair()
        context.curve_serverkey = kernel["curve"].encode()
        client = BlockingKernelClient(context=context)
        info: dict[str, Any] = {"ip": "127.0.0.1", "transport": "tcp", "key": kernel["key"]}
        info |= {f"{name}_port": port for name, port in kernel["ports"].items()}
        client.load_connection_info(info)  # type: ignore[arg-type] # a TypedDict of these very keys
        client.start_channels(shell=True, iopub=True, stdin=False, hb=False, control=False)
        return client

    def close(self) -> None:
        """End the thread and the connection; may be called twice."""
        if self._closed:
            return
        self._closed = True
        self._pump_thread.join(5)
        self._client.stop_channels()
        self._client.context.destroy(linger=0)

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
            "stop_on_error": True,
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
        with self._turn(timeout_s):
            self._sync()
            session = self._client.session
            message = session.msg(kind, content)
            ident = message["header"]["msg_id"]
            with self._inbox(ident) as inbox:
                session.send(self._client.shell_channel.socket, message, buffers=buffers)
                try:
                    self._until_idle(inbox, timeout_s, on_output)
                except (KeyboardInterrupt, HostTimeout) as error:
                    self._stop(inbox, on_output, error)
                    raise
            return self._reply_to(ident)

    @contextlib.contextmanager
    def _turn(self, timeout_s: float | None) -> Iterator[None]:
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
        self, inbox: queue.SimpleQueue[Message], timeout_s: float | None, on_output: OnOutput | None
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
            if kind == "status":
                if message["content"]["execution_state"] == "idle":
                    return
            elif on_output is not None:
                on_output(message)

    def _died(self, event: Message) -> HostDied:
        """The error for a kernel that ended, made when its successor is there."""
        self._synced = False
        back = self._back.wait(BACK_S)
        again = "A fresh one is running: its variables and RDMA objects are gone, so run the cells"
        again += " that made them again."
        return HostDied(
            self.name,
            f"The kernel {why_died(event, self.memory_mib)}.",
            next_step=again if back else f"It did not come back; try lab.{self.name}.restart().",
        )

    def _stop(
        self, inbox: queue.SimpleQueue[Message], on_output: OnOutput | None, error: BaseException
    ) -> None:
        """Interrupt what runs; replace the kernel if it does not react."""
        self.interrupt()
        try:
            self._until_idle(inbox, INTERRUPT_GRACE_S, on_output)
        except HostTimeout:
            self.restart()
            note = f"[{self.name}] did not react to the interrupt; it has a fresh kernel now."
            if isinstance(error, HostTimeout):
                error.args = (f"{error.args[0]} {note}",)
            elif on_output is not None:
                on_output(
                    {"msg_type": "stream", "content": {"name": "stdout", "text": note + "\n"}}
                )
        except HostDied:
            pass  # it is fresh already, which is what stopping wants

    def _reply_to(self, ident: str) -> Message:
        """The reply on the shell channel; the kernel sends it before it says that it is idle."""
        end = time.monotonic() + 10
        while time.monotonic() < end:
            if not self._client.shell_channel.socket.poll(int(SLICE_S * 1000)):
                continue
            message: Message = self._client.shell_channel.get_msg(timeout=0)
            if message["parent_header"].get("msg_id") == ident:
                return message
        raise HostTimeout(self.name, "finished, but its reply is lost.", next_step="Run it again.")

    def _sync(self) -> None:
        """Make sure once per kernel that its output reaches us: a first question and its echo."""
        end = time.monotonic() + BACK_S
        while not self._synced:
            message = self._client.session.msg("kernel_info_request", {})
            ident = message["header"]["msg_id"]
            with self._inbox(ident) as inbox:
                self._client.shell_channel.send(message)
                try:
                    self._until_idle(inbox, SYNC_S, None)
                    self._reply_to(ident)
                    self._synced = True
                except HostTimeout:
                    if time.monotonic() > end:
                        raise HostTimeout(
                            self.name,
                            f"does not answer (for {BACK_S:.0f} s).",
                            next_step=f"Try lab.{self.name}.restart(), then rdmalab down and up.",
                        ) from None

    # --- control ----------------------------------------------------------------------------

    def interrupt(self) -> None:
        """Send SIGINT to the kernel: Python raises KeyboardInterrupt, a blocked call returns."""
        self.remote.call("interrupt", host=self.name)

    def restart(self, timeout_s: float = 30.0) -> None:
        """Replace the kernel; memory, queue pairs and processes of the old one are freed."""
        self._synced = False
        self.remote.call("restart", host=self.name, timeout_s=timeout_s)

    def complete(self, code: str, cursor: int, timeout_s: float = 1.0) -> Message | None:
        """Completions on the host, or None if it is busy or does not answer in time."""
        if not self.lock.acquire(blocking=False):
            return None
        try:
            content = {"code": code, "cursor_pos": cursor}
            reply = self.request("complete_request", content, [], timeout_s, None)
            return dict(reply["content"])
        except HostTimeout:
            return None
        finally:
            self.lock.release()

    # --- the output channel -----------------------------------------------------------------

    @contextlib.contextmanager
    def _inbox(self, ident: str) -> Iterator[queue.SimpleQueue[Message]]:
        inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._waiters[ident] = inbox
        try:
            yield inbox
        finally:
            del self._waiters[ident]

    def _pump(self) -> None:
        """Always drain the output channel; runs in its own thread."""
        channel = self._client.iopub_channel
        while not self._closed:
            if channel.socket.poll(200):
                try:
                    message = channel.get_msg(timeout=0)
                except ValueError:
                    continue  # not signed with this lab's key
                inbox = self._waiters.get(message["parent_header"].get("msg_id", ""))
                if inbox is not None:
                    inbox.put(message)

    def _on_event(self, event: dict[str, Any]) -> None:
        """The guest says that a kernel died or is back; called in the remote's thread."""
        if event.get("host") != self.name:
            return
        if event["state"] == "ready":
            self._back.set()
            return
        self._back.clear()
        self._synced = False
        for inbox in list(self._waiters.values()):
            inbox.put({"msg_type": "died", **event})


class Job:
    """Code that runs on a host beside the next cells; made by ``Host.start`` and ``%%on --bg``."""

    def __init__(self, kernel: HostKernel, code: str, timeout_s: float | None) -> None:
        self.host = kernel.name
        self.messages: list[Message] = []
        self._kernel = kernel
        self._error: BaseException | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(code, timeout_s), name=f"rdmalab-job-{self.host}", daemon=True
        )
        self._thread.start()
        self._started.wait(5)

    def _run(self, code: str, timeout_s: float | None) -> None:
        with self._kernel.lock:
            self._started.set()
            try:
                self._kernel.run(code, timeout_s=timeout_s, on_output=self.messages.append)
            except BaseException as error:
                self._error = error

    @property
    def done(self) -> bool:
        """Whether it has ended, well or badly."""
        return not self._thread.is_alive()

    def wait(self, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> None:
        """Wait for the end. Raises :class:`HostTimeout` after ``timeout_s``; the job goes on."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while self._thread.is_alive():
            left = SLICE_S if end is None else end - time.monotonic()
            if left <= 0:
                raise HostTimeout(
                    self.host,
                    f"The job is still running after {timeout_s:g} s.",
                    next_step=f"Wait again, or stop it: lab.{self.host}.interrupt()",
                )
            self._thread.join(min(SLICE_S, left))

    def result(self, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> None:
        """Wait, replay the job's output, and raise what it raised."""
        from .outputs import Relay

        self.wait(timeout_s)
        with Relay(self.host) as relay:
            for message in self.messages:
                relay(message)
        if self._error is not None:
            raise self._error

    def interrupt(self) -> None:
        """Stop it; ``result()`` then raises KeyboardInterrupt's remote form."""
        self._kernel.interrupt()

    def __repr__(self) -> str:
        how = "running" if not self.done else "failed" if self._error else "done"
        return f"<Job on {self.host}: {how}>"
