"""The C tools beside our own loops: perftest and sockperf, run on a host, their output read.

==========  =============  ====================================================
kind        tool           what a sample is, in microseconds
==========  =============  ====================================================
``tcp``     sockperf       half a round trip
``send``    ib_send_lat    half a round trip
``write``   ib_write_lat   half a round trip; the receiver polls its memory
``read``    ib_read_lat    the whole READ: request out, data back
==========  =============  ====================================================

The server's side runs as a context manager, the client's side as one call::

    bob    with served("send", size=64, rounds=1000, port=18620): ...
    alice  lat_us = asked("send", "10.0.0.2", size=64, rounds=1000, port=18620)
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy

__all__ = [
    "TOOLS",
    "ToolError",
    "UnsteadyClock",
    "asked",
    "command",
    "parse_perftest",
    "parse_sockperf",
    "served",
]

TOOLS = {
    "tcp": "sockperf",
    "send": "ib_send_lat",
    "write": "ib_write_lat",
    "read": "ib_read_lat",
}
SOCKPERF_LEAST = 14  # bytes: its own header
SOCKPERF_S = 1  # whole seconds; it leaves out the first 0.4 s and the last 0.05 s
RETRY_S = 0.05
READY_S = 20.0  # for a server to come up
READY = re.compile(b"Waiting for client|to block on socket")  # what it says then
CLIENT_S = 15.0  # for one try of a client
NOT_THERE = re.compile("Couldn't connect|Can`t connect|forcibly closed")
UNSTEADY = "Correlation coefficient r^2"  # perftest's get_clock.c, when it gives up


class ToolError(RuntimeError):
    """A C tool did not do its work; the text has its last words."""


class UnsteadyClock(ToolError):
    """perftest has counted processor cycles, and could not tell how long a cycle is.

    That happens now and then on a busy machine. The next run may be able to.
    """


def command(kind: str, size: int, rounds: int, port: int, peer_ip: str = "") -> list[str]:
    """The command line of a tool; of its server without ``peer_ip``. Messages of ``size`` bytes.

    sockperf takes a time, not a number of rounds, and at least 14 bytes.
    """
    from . import here

    if kind != "tcp":
        words = [TOOLS[kind], "-d", here.device, "-x", str(here.gid_index), "-p", str(port)]
        words += ["-m", str(here.mtu), "-s", str(size), "-n", str(rounds), "-F", "-U"]
        if kind != "read":
            words += ["-I", "0"]  # not inline, as in our own loops
        return words + ([peer_ip] if peer_ip else [])
    words = ["sockperf", "ping-pong" if peer_ip else "server", "--tcp", "-p", str(port)]
    if not peer_ip:
        return [*words, "-i", here.ip]
    size = max(size, SOCKPERF_LEAST)
    return [*words, "-i", peer_ip, "-m", str(size), "-t", str(SOCKPERF_S)]


def parse_perftest(text: str) -> Any:
    """The samples that ``-U`` lists, as a numpy array of microseconds, in order of time.

    Raises :class:`UnsteadyClock` where they are infinite, :class:`ToolError` where there are none.
    """
    if UNSTEADY in text:
        raise UnsteadyClock(
            "perftest could not measure how long a cycle of the processor is, several times over:"
            " the machine is too busy. Try again when less runs beside the hosts."
        )
    samples = re.findall(r"^\d+, ([\d.]+(?:e[+-]?\d+)?)\s*$", text, re.MULTILINE)
    if not samples:
        raise ToolError(f"perftest listed no samples: {text.strip()[-400:]}")
    return numpy.array([float(word) for word in samples])


def parse_sockperf(log: str) -> Any:
    """The half round trips in a ``--full-log`` (packet, sent at, received at, half of between)."""
    samples = re.findall(r"^\d+, [\d.]+, [\d.]+, ([\d.]+)\s*$", log, re.MULTILINE)
    if not samples:
        raise ToolError(f"sockperf logged no packets: {log.strip()[-400:]}")
    return numpy.array([float(word) for word in samples])


@contextlib.contextmanager
def served(kind: str, *, size: int, rounds: int, port: int) -> Iterator[None]:
    """The tool's server, ready for its client; it is ended with the block, whatever happens."""
    words = ["stdbuf", "-oL", *command(kind, size, rounds, port)]
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        try:
            end = time.monotonic() + READY_S
            while not READY.search(os.pread(out.fileno(), 4096, 0)):
                if process.poll() is not None or time.monotonic() > end:
                    said = os.pread(out.fileno(), 4096, 0).decode(errors="replace")
                    raise ToolError(f"{' '.join(words)} does not serve: {said.strip()[-400:]}")
                time.sleep(RETRY_S)
            yield
            if kind != "tcp":  # sockperf's server never ends by itself
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(5)
        finally:
            process.kill()
            process.wait(5)


def asked(
    kind: str, peer_ip: str, *, size: int, rounds: int, port: int, deadline_s: float = 50
) -> Any:
    """Run the tool against its server; its samples in microseconds (see above), a numpy array.

    A client that hangs or finds no server is run again. :class:`ToolError` after ``deadline_s``.
    """
    words = command(kind, size, rounds, port, peer_ip)
    end = time.monotonic() + deadline_s
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log.csv")
        if kind == "tcp":
            words += ["--full-log", str(log)]
        while (left_s := end - time.monotonic()) > 0:
            said = attempt(words, min(left_s, CLIENT_S))
            if said and not NOT_THERE.search(said):
                return parse_sockperf(log.read_text()) if kind == "tcp" else parse_perftest(said)
            time.sleep(RETRY_S)
    raise ToolError(f"{' '.join(words)}: not done within {deadline_s:g} s.")


def attempt(words: list[str], timeout_s: float) -> str:
    """Run a client once; all that it says, or nothing if it did not end in time.

    The exit code is not asked: sockperf's is 0 when it could not connect, too.
    """
    quiet = subprocess.DEVNULL
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, stdin=quiet)
    except subprocess.TimeoutExpired:
        return ""
    return f"{done.stdout}\n{done.stderr}"
