"""A host's Jupyter kernel: started early, bound late.

A kernel is made ready *before* the snapshot of the virtual machine is taken, with its sockets
open but bound to nothing. After a restore it gets fresh keys, binds and answers at once. So a
restored lab starts in the time of a few system calls, and no two labs ever share a secret.

The sockets speak CurveZMQ: a client that does not know the kernel's public key (it is in the
lab's 0700 folder only) can neither run code nor read output, although the port is on loopback.
"""

from __future__ import annotations

import base64
import importlib
import json
import os
import random
import signal
import socket
import sys
import tempfile
import warnings
from typing import Any

import zmq
from ipykernel.heartbeat import Heartbeat
from ipykernel.iostream import OutStream
from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelapp import IPKernelApp
from ipykernel.zmqshell import ZMQInteractiveShell
from traitlets import Type

from . import deskseat, doorway
from .values import pack, refusal, unpack

__all__ = ["HostKernel", "HostKernelApp", "appoint_judge", "serve", "warm_up"]

OUTPUT_PIECE = 65536  # characters of output in one message at most
OUTPUT_WAITING = 64  # messages of output that wait for a slow reader; then its writer waits


judge: Any = None  # the module, where there is a desk: a lab that is not graded does without


def appoint_judge() -> None:
    """Import the judge for all kernels of a lab that is graded, and take the first notes."""
    global judge
    judge = importlib.import_module(f"{__package__}.judge")
    judge.prepare()


class HostShell(ZMQInteractiveShell):
    """A shell that, where there is a judge, goes on whatever a cell has done to its modules."""

    aftermath: Any = None

    async def run_code(self, code_obj: Any, result: Any = None, *, async_: bool = False) -> Any:
        """Run a cell's code."""
        aftermath = self.aftermath
        try:
            return await super().run_code(code_obj, result, async_=async_)
        finally:
            if aftermath is not None:
                aftermath()


class HostKernel(IPythonKernel):
    """An IPython kernel that also hands plain data in and out (``Host.get`` and ``Host.put``).

    Two more shell messages, ``rdmalab_get_request`` and ``rdmalab_put_request``. Values travel
    as JSON, bytes as one binary buffer, numpy arrays as a buffer with dtype and shape. And two for
    grading: ``rdmalab_judge_request``, before any learner's code, and ``rdmalab_check_request``.
    """

    shell_class = Type(HostShell)
    notes: Any = None  # of what there is before any learner's code, for the judge

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.shell_handlers["rdmalab_get_request"] = self.get_request
        self.shell_handlers["rdmalab_put_request"] = self.put_request
        self.shell_handlers["rdmalab_judge_request"] = self.judge_request
        self.shell_handlers["rdmalab_check_request"] = self.check_request

    def note(self) -> None:
        """Take the judge's notes, before any learner's code has run, if there is a judge."""
        self.notes = judge.prepare() if judge else None

    def judge_request(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        """Put the judge into office, once; from then on this kernel judges checks."""
        if self.notes is not None:
            secret = bytes.fromhex(parent["content"]["secret"])
            copies, habits = self.notes
            self.shell.aftermath = judge.convene(secret, copies, habits, self.shell.user_ns)
            self.notes = None
        status = {"status": "ok" if judge else "error"}
        self._reply(stream, "rdmalab_judge_reply", status, parent, ident, [])

    def check_request(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        """Reply with the verdict of a check."""
        verdict = judge.answer(parent["content"]) if judge else {}
        self._reply(stream, "rdmalab_check_reply", verdict, parent, ident, [])

    def get_request(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        """Reply with the value of a variable, or say why it cannot travel."""
        name = parent["content"]["name"]
        try:
            content, buffers = pack(self.shell.user_ns[name])
        except KeyError:
            content, buffers = refusal("NameError", f"name {name!r} is not defined"), []
        except (TypeError, ValueError) as error:
            content, buffers = refusal(type(error).__name__, f"{name}: {error}"), []
        self._reply(stream, "rdmalab_get_reply", content, parent, ident, buffers)

    def put_request(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        """Set a variable in the learner's name space."""
        content = parent["content"]
        self.shell.user_ns[content["name"]] = unpack(content, parent["buffers"])
        self._reply(stream, "rdmalab_put_reply", {"status": "ok"}, parent, ident, [])

    def _reply(
        self, stream: Any, kind: str, content: Any, parent: Any, ident: Any, buffers: list[Any]
    ) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self.session.send(stream, kind, content, parent, ident, buffers=buffers)

    def raw_input(self, prompt: str = "") -> str:
        """``input()`` has nobody to ask: the keyboard is the notebook's."""
        here = own_name()
        raise RuntimeError(f"input() does not work on {here}; set the variable in the cell instead")

    def getpass(self, prompt: str = "", stream: Any = None) -> str:
        """As ``input()``."""
        return self.raw_input(prompt)

    def do_shutdown(self, restart: bool) -> dict[str, Any]:
        """A host's kernel is ended by the lab, not by a client."""
        return {"status": "ok", "restart": restart}


class HostStream(OutStream):
    """Standard output that waits for its reader, so that an endless print fills no memory."""

    held = 0

    def write(self, string: str) -> int:
        """Write in pieces; each full piece is handed over before the next is taken."""
        self.held += len(string)
        if self.held < OUTPUT_PIECE:
            super().write(string)
            return len(string)
        for start in range(0, len(string), OUTPUT_PIECE):
            super().write(string[start : start + OUTPUT_PIECE])
            self.flush()
        self.held = 0
        return len(string)


class CurveHeartbeat(Heartbeat):
    """The heartbeat echo on a socket that is bound with the kernel's keys."""

    def __init__(self, app: HostKernelApp, fd: int) -> None:
        super().__init__(zmq.Context(), ("tcp", "0.0.0.0", app.hb_port))
        self.app, self.fd = app, fd

    def _try_bind_socket(self) -> None:
        self.app.bind_curve(self.socket, self.fd)


class HostKernelApp(IPKernelApp):
    """The kernel application with its sockets left unbound until :meth:`open_for` is called."""

    kernel_class = HostKernel
    outstream_class = f"{__name__}.HostStream"
    keys: dict[str, str]

    def _bind_socket(self, s: Any, port: int) -> int:
        return port or 1  # bound later, see open_for

    def init_heartbeat(self) -> None:
        """Later: the heartbeat's socket needs the keys too."""

    def init_connection_file(self) -> None:
        """None: the lab knows the keys, and nobody on the host needs them."""

    def write_connection_file(self) -> None:
        """None, as above."""

    def log_connection_info(self) -> None:
        """Nothing to say before the keys are there."""

    def init_crash_handler(self) -> None:
        """Uncaught errors of the kernel itself go to the guest's console."""

    def bind_curve(self, sock: Any, fd: int) -> None:
        """Bind with the kernel's keys on a listening socket that was made outside of the host."""
        public, secret = self.keys["curve_publickey"], self.keys["curve_secretkey"]
        doorway.bind(sock, fd, public.encode(), secret.encode())

    def open_for(self, keys: dict[str, str], fds: dict[str, int]) -> None:
        """Bind all channels with fresh keys. ``fds``: listening sockets by channel."""
        self.keys = keys
        self.session.key = keys["key"].encode()
        self.session.session = keys["session"]
        self.bind_curve(self.shell_socket, fds["shell"])
        self.bind_curve(self.stdin_socket, fds["stdin"])
        self.bind_curve(self.control_socket, fds["control"])
        iopub = self.iopub_thread
        iopub.socket.sndhwm = OUTPUT_WAITING
        iopub.socket.setsockopt(zmq.XPUB_NODROP, 1)  # wait for readers instead of losing output
        iopub.schedule(lambda: self.bind_curve(iopub.socket, fds["iopub"]))
        self.heartbeat = CurveHeartbeat(self, fds["hb"])
        self.heartbeat.start()


def warm_up() -> None:
    """Import in the nursery what a kernel imports late, so that every fork has it already."""
    import asyncio.selector_events
    import concurrent.futures.thread

    import comm
    import IPython.core.completer
    import IPython.core.magics
    import pygments.formatters.terminal256
    import pygments.lexers.python
    import pygments.styles.default
    import stack_data
    import tornado.ioloop
    import tornado.platform.asyncio
    import zmq.utils.garbage

    del asyncio, concurrent, comm, IPython, pygments, stack_data, tornado, zmq


def own_name() -> str:
    """This host's name, which is not always that of the machine."""
    return os.environ.get("HOSTNAME") or socket.gethostname()


def refuse_exit() -> None:
    """What ``exit`` and ``quit`` do on a host."""
    here = own_name()
    raise RuntimeError(f"exit does not end {here}; lab.{here}.restart() gives it a fresh kernel")


def make_app() -> HostKernelApp:
    """A kernel, ready but for its sockets' addresses."""
    tempfile.tempdir = "/tmp"  # IPython asks for it in each cell, and may when it is full too
    app = HostKernelApp.instance()
    app.config.HistoryManager.enabled = False
    app.config.InteractiveShell.colors = "Linux"
    app.config.Session.key = b"unset"
    app.capture_fd_output = True
    app.initialize(["kernel", "--quiet"])
    app.shell.ask_exit = refuse_exit
    warnings.filterwarnings("ignore", message="To exit: use")  # IPython's answer to sys.exit()
    app.shell.run_cell("1 + 1", silent=True, store_history=False)
    return app


def reseed(seed: str) -> None:
    """Fresh randomness for this process: every restore starts from the same memory."""
    random.seed(base64.b64decode(seed) + os.urandom(16))
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(int.from_bytes(os.urandom(4), "big"))


def serve(channel: socket.socket, fds: dict[str, int], *, is_desk: bool) -> None:
    """The kernel process: get ready, say ``parked``, wait for keys, bind, say ``ready``, serve.

    ``channel`` is one end of a socket pair to the host's init; never returns.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    app = make_app()
    if is_desk:
        deskseat.sit_down()
    app.kernel.note()
    channel.send(b"parked")
    keys = json.loads(channel.recv(65536) or b"{}")
    if not keys:
        os._exit(0)  # the host's init is gone
    reseed(keys["seed"])
    if is_desk:
        deskseat.take_lab(keys["lab"])
    app.open_for(keys, fds)

    def say_ready() -> None:
        channel.send(b"ready")
        channel.close()

    from tornado.ioloop import IOLoop

    IOLoop.current().add_callback(say_ready)
    app.start()
    os._exit(0)
