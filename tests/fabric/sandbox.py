"""A machine within the machine: run-time folder, cache and temporary folder of a test's own.

The command line runs in it, and then it tells what is left: processes, sockets, mounts, files.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil

import rdmalab
from rdmalab import image, microvm, overlay, paths, snapshot, topology

SOURCE = Path(rdmalab.__file__).parent.parent  # commands run the package that is tested
DEADLINE_S = 240.0  # for any command; generous, since the machine may be busy
KEPT_FILES = ("images", "jupyter", "kvm", "lab-settings", "logs", "output", "snapshots")


class Done(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


class Command:
    """A running command; what it says on stderr is kept with the time at which it came."""

    def __init__(self, line: list[str], env: dict[str, str], out: Path, cwd: Path) -> None:
        self.out = out
        self.begin = time.monotonic()
        self.said: list[tuple[float, str]] = []
        with open(out, "wb") as file:
            self.process = subprocess.Popen(
                line,
                env=env,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with contextlib.suppress(ValueError):  # closed under us, as a child keeps it open
            for line in self.process.stderr:
                self.said.append((time.monotonic(), line))

    def err(self) -> str:
        """What it has said on stderr so far."""
        return "".join(line for _, line in self.said)

    def wait(self, deadline_s: float = DEADLINE_S) -> Done:
        """Its end; a command that does not end is killed and fails the test."""
        try:
            code = self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(20)
            raise AssertionError(f"no end after {deadline_s} s; it said:\n{self.err()}") from None
        self.reader.join(5)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return Done(code, self.out.read_text(errors="replace"), self.err())

    def until(self, condition: Callable[[], bool], deadline_s: float = DEADLINE_S) -> bool:
        """Wait for a condition; False if the command ends before it."""
        end = time.monotonic() + deadline_s
        while not condition():
            if self.process.poll() is not None:
                return False
            assert time.monotonic() < end, f"not reached in {deadline_s} s:\n{self.err()}"
            time.sleep(0.001)
        return True

    def end(self, signum: int) -> Done:
        """Send it a signal and wait for its end."""
        self.process.send_signal(signum)
        return self.wait(60)

    def longest_silence_s(self) -> float:
        """The longest time in which it said nothing."""
        times = [self.begin, *(when for when, _ in self.said), time.monotonic()]
        return max(later - earlier for earlier, later in zip(times, times[1:], strict=False))


class Sandbox:
    """See the module. ``env`` is what the commands get; change it before a command."""

    def __init__(self, cache: Path, name: str = "run") -> None:
        self.home = Path(tempfile.mkdtemp(prefix="rdmalab-test-", dir="/tmp"))
        self.home.chmod(0o755)
        self.runtime, self.cache, self.tmp = self.home / name, cache, self.home / "tmp"
        self.tmp.mkdir()
        self.tmp.chmod(0o1777)
        dropped = ("RDMALAB_", "XDG_", "PYTEST_", "JPY_")
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
        self.env |= {"RDMALAB_RUNTIME_DIR": str(self.runtime), "RDMALAB_CACHE_DIR": str(cache)}
        self.env |= {"TMPDIR": str(self.tmp), "PYTHONPATH": str(SOURCE)}
        self.prefix: list[str] = []
        self.commands = 0

    # --- the command line -----------------------------------------------------------------------

    def start(self, *words: str, **env: str) -> Command:
        """Start ``rdmalab WORDS``."""
        self.commands += 1
        line = [*self.prefix, sys.executable, "-m", "rdmalab", *words]
        return Command(line, {**self.env, **env}, self.home / f"out-{self.commands}", self.home)

    def run(self, *words: str, deadline_s: float = DEADLINE_S, **env: str) -> Done:
        """Run ``rdmalab WORDS`` to its end."""
        return self.start(*words, **env).wait(deadline_s)

    def up(self, *words: str, **env: str) -> dict[str, Any]:
        """``rdmalab up --json``, which must succeed; its document, and what it said as ``said``."""
        done = self.run("up", "--json", *words, **env)
        assert done.code == 0, done.err
        return {**json.loads(done.out), "said": done.err}

    def works(self, lab: str = "default", host: str = "alice", peer: str = "10.0.0.1") -> None:
        """A host of the lab runs a command and reaches a peer (or itself) over its network."""
        words = ("exec", "--lab", lab, host, "--", "ping", "-c1", "-W5", peer)
        done = self.run(*words)
        assert done.code == 0 and "1 received" in done.out, done

    # --- what there is --------------------------------------------------------------------------

    def lab(self, name: str = "default") -> Path:
        """A lab's folder."""
        return self.runtime / "labs" / name

    def qemus(self, lab: str = "") -> list[int]:
        """The pids of this sandbox's QEMUs, found by their command lines."""
        mark = f"{self.runtime}/labs/{lab}" if lab else str(self.runtime)
        found = []
        for process in psutil.process_iter(["name", "cmdline"]):
            words = process.info["cmdline"] or []
            if "qemu" in (process.info["name"] or "") and any(mark in word for word in words):
                found.append(process.pid)
        return found

    def processes(self) -> dict[int, str]:
        """Living processes that belong here: by their command line or their environment."""
        found = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                    words = [*process.cmdline(), *process.environ().values()]
                    if any(str(self.runtime) in word for word in words):
                        found[process.pid] = " ".join(process.cmdline())[:150]
        return found

    def left(self) -> list[str]:
        """Everything that would not be here if nothing had ever run."""
        found = [f"process {pid}: {line}" for pid, line in self.processes().items()]
        for table in ("/proc/net/unix", "/proc/self/mountinfo"):
            for line in Path(table).read_text(errors="replace").splitlines():
                if str(self.runtime) in line or str(self.home) in line:
                    found.append(f"{table}: {line}")
        for folder in (self.runtime, self.tmp):
            found += [str(path) for path in folder.rglob("*") if path != self.runtime / "labs"]
        if self.cache != paths.cache_dir():  # in the user's own somebody else may be at work
            inside = [*self.cache.iterdir(), *self.cache.glob("snapshots/.*")]
            found += [str(path) for path in inside if path.name not in KEPT_FILES]
        return found

    def close(self) -> list[str]:
        """Take everything down and away; what was left before that could not go by itself."""
        self.env.pop("RDMALAB_ACCEL", None)
        down = self.run("down", "--all", deadline_s=60)
        left = [] if down.code == 0 else [f"down --all: {down}"]
        left += self.left()
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.home, ignore_errors=True)
        return left


@contextlib.contextmanager
def sandbox(cache: Path | None = None, name: str = "run") -> Iterator[Sandbox]:
    """A sandbox, in this user's cache or another; at its end nothing may be left of it."""
    box = Sandbox(cache or paths.cache_dir(), name)
    try:
        yield box
    except BaseException:
        box.close()
        raise
    left = box.close()
    assert left == [], "left behind:\n" + "\n".join(left)


@contextlib.contextmanager
def private_cache(*hosts: str, verdict: bool = True, name: str = "test-") -> Iterator[Path]:
    """A cache with the guest image (and whether KVM works); with ``hosts`` also their saved start.

    Files are hard links to the user's own cache: what a test damages it must copy first.
    """
    found = image.find_image()
    assert found is not None, "there is no guest image: rdmalab image build"
    own = paths.cache_dir()
    cache = Path(tempfile.mkdtemp(prefix=name, dir=own))
    try:
        shutil.copytree(found.folder, cache / "images" / found.id, copy_function=os.link)
        if verdict and (own / "kvm").exists():
            shutil.copytree(own / "kvm", cache / "kvm")
        if hosts:
            key = saved(*hosts)
            links = cache / "snapshots" / key
            shutil.copytree(own / "snapshots" / key, links, copy_function=os.link)
        yield cache
    finally:
        shutil.rmtree(cache, ignore_errors=True)


def saved(*names: str) -> str:
    """The key of the saved start of these hosts in the user's cache, made now if need be."""
    found = image.find_image()
    assert found is not None, "there is no guest image: rdmalab image build"
    hosts = topology.plan(names)
    machine = microvm.plan_machine(found, hosts)
    key = microvm.snapshot_key(found, machine, overlay.files(hosts))
    if snapshot.find(key, machine.qemu.banner)[0] is None:
        with sandbox() as box:
            box.up(*names)
    return key


def own_copy(folder: Path) -> None:
    """Give hard-linked files of a folder an own copy each, so that they can be damaged."""
    for file in folder.iterdir():
        copy = file.with_name(f"{file.name}.copy")
        shutil.copy2(file, copy)
        copy.rename(file)


def trust(saved_start: Path) -> None:
    """Let a snapshot's files, as they are now, be the ones that were saved."""
    file = saved_start / "snapshot.json"
    meta = json.loads(file.read_text())
    for name in snapshot.FILES:
        seen = snapshot.stamp(saved_start / name)
        meta[name] = {"size": seen[0], "stamp": seen}
    file.write_text(json.dumps(meta))
