"""Commands for a running test machine: what its process 1 (guest/boot.py) takes and answers."""

from __future__ import annotations

import errno
import json
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rdmalab.console import said_in
from rdmalab.errors import BackendError

__all__ = ["FRAME", "Machine", "Ran"]

FRAME = struct.Struct("!cI")  # a letter and the length of what follows

Hear = Callable[[str, bytes], None]


class Ran(NamedTuple):
    """How a command ended: exit code (negative: that signal), standard output and error."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Machine:
    """A running test machine: its folder, and where it takes commands."""

    folder: str
    port: int
    token: str

    def run(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float = 120.0,
        check: bool = True,
        env: Mapping[str, str] | None = None,
        cwd: str = "/checkout",
        hear: Hear | None = None,
    ) -> Ran:
        """Run a shell line, or a program with its arguments, and return how it ended.

        ``hear`` gets "o" or "e", and bytes, as they come. A command that takes too long, or with
        ``check`` one that fails, is a BackendError with what it said; it is ended in any case.
        """
        argv = ["sh", "-c", command] if isinstance(command, str) else list(command)
        said: dict[str, list[bytes]] = {"o": [], "e": []}
        code, how = None, "was not answered: the machine has ended"
        try:
            for kind, data in self._frames(argv, dict(env or {}), cwd, timeout_s):
                if kind == "x":
                    code, how = int(data), f"ended with exit code {int(data)}"
                    break
                said[kind].append(data)
                if hear:
                    hear(kind, data)
        except TimeoutError:
            how = f"was not done within {timeout_s:.0f} s"
        except OSError as error:
            how += f" ({error.strerror}){said_in(Path(self.folder)).shown()}"
        out, err = (b"".join(said[kind]).decode(errors="replace") for kind in "oe")
        if code is None or (check and code != 0):
            raise BackendError(f"In the test machine: {argv[-1]!r} {how}.\n{out}{err}")
        return Ran(code, out, err)

    def _frames(
        self, argv: list[str], env: dict[str, str], cwd: str, timeout_s: float
    ) -> Iterator[tuple[str, bytes]]:
        """What comes back, piece by piece. Raises TimeoutError, OSError if the machine ends."""
        end = time.monotonic() + timeout_s
        order = {"token": self.token, "argv": argv, "env": env, "cwd": cwd}
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as sock:
            sock.sendall(json.dumps(order).encode() + b"\n")
            buffer = b""
            while True:
                sock.settimeout(max(0.001, end - time.monotonic()))
                data = sock.recv(1 << 16)
                if not data:
                    raise ConnectionResetError(errno.ECONNRESET, "it hung up")
                buffer += data
                while len(buffer) >= FRAME.size:
                    kind, size = FRAME.unpack_from(buffer)
                    if len(buffer) < FRAME.size + size:
                        break
                    yield kind.decode(), buffer[FRAME.size : FRAME.size + size]
                    buffer = buffer[FRAME.size + size :]
