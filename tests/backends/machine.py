"""A machine with Soft-RoCE in its kernel and a Docker engine, emulated, for whoever has neither.

::

    with started(checkout) as machine:
        machine.run("rdmalab up --backend docker").out

or by hand, from a checkout::

    python -m tests.backends.machine run 'rdma link; docker info'    # a machine for one command
    python -m tests.backends.machine up                              # one that stays, until `down`
    python -m tests.backends.machine run 'python -m pytest -x tests/unit'
    python -m tests.backends.machine down

In it /checkout is the checkout as it is now (read-only), PYTHONPATH has it and all packages that
pyproject.toml asks for, rdmalab's cache has this machine's guest image, commands run as root. It
reaches no network; only who knows its token can run commands in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from rdmalab import image, qemu, qmp
from rdmalab.bootport import GuestPanic, collect, launched
from rdmalab.cpio import write_cpio
from rdmalab.errors import BackendError, RdmalabError, UsageError
from rdmalab.leash import leashed
from rdmalab.manifest import GuestImage
from rdmalab.paths import cache_dir, runtime_dir

from . import disks

__all__ = ["Machine", "Ran", "started"]

PORT = 7000  # as in guest/boot.py
NETWORK = "192.168.76.0/24"  # labs take addresses of 10.0.0.0/8
RAM_MIB = 2560
SCRATCH_BYTES = 8 << 30  # sparse: Docker's images and containers
BOOT_S = {"tcg": 300.0, "kvm": 60.0}
BOOT_TRIES = 3
FRAME = struct.Struct("!cI")
NAME = "test-machine"

Say = Callable[[str], None]
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
        code = None
        try:
            for kind, data in self._frames(argv, dict(env or {}), cwd, timeout_s):
                if kind == "x":
                    code = int(data)
                    break
                said[kind].append(data)
                if hear:
                    hear(kind, data)
            failed = check and code != 0
            how = f"ended with exit code {code}" if code is not None else "lost the machine"
        except TimeoutError:
            failed, how = True, f"was not done within {timeout_s:.0f} s"
        out, err = (b"".join(said[kind]).decode(errors="replace") for kind in "oe")
        if failed or code is None:
            raise BackendError(f"In the test machine: {argv[-1]!r} {how}.\n{out}{err}")
        return Ran(code, out, err)

    def _frames(
        self, argv: list[str], env: dict[str, str], cwd: str, timeout_s: float
    ) -> Iterator[tuple[str, bytes]]:
        """What comes back, piece by piece, until the machine hangs up. Raises TimeoutError."""
        end = time.monotonic() + timeout_s
        order = {"token": self.token, "argv": argv, "env": env, "cwd": cwd}
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as sock:
            sock.sendall(json.dumps(order).encode() + b"\n")
            buffer = b""
            while True:
                sock.settimeout(max(0.001, end - time.monotonic()))
                data = sock.recv(1 << 16)
                if not data:
                    return
                buffer += data
                while len(buffer) >= FRAME.size:
                    kind, size = FRAME.unpack_from(buffer)
                    if len(buffer) < FRAME.size + size:
                        break
                    yield kind.decode(), buffer[FRAME.size : FRAME.size + size]
                    buffer = buffer[FRAME.size + size :]

    def end(self) -> None:
        """Turn it off; nothing of it is left."""
        folder = Path(self.folder)
        qmp.end_qemu(folder / "qmp.sock")
        collect()
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()


@contextlib.contextmanager
def started(checkout: Path = disks.ROOT, say: Say = print) -> Iterator[Machine]:
    """A machine that ends with the block, and, however it ends, with this process."""
    machine = boot(checkout, say, stays=False)
    try:
        yield machine
    finally:
        machine.end()


def boot(checkout: Path, say: Say, *, stays: bool) -> Machine:
    """Boot a machine; one that ``stays`` lives until somebody ends it."""
    made = disks.find_or_make(say)
    guest_image = image.find_image() or image.build_image()
    folder = Path(tempfile.mkdtemp(prefix=f"{NAME}-", dir=runtime_dir()))
    try:
        for attempt in range(1, BOOT_TRIES + 1):
            try:
                return boot_once(folder, made, guest_image, checkout, say, stays=stays)
            except GuestPanic as panic:  # see rdmalab/hostside/processors.py
                if attempt == BOOT_TRIES:
                    raise
                say(f"the kernel panicked as it booted; trying again ({panic.log})")
        raise AssertionError("unreachable")
    except BaseException:
        Machine(str(folder), 0, "").end()
        raise


def boot_once(
    folder: Path, made: Path, guest_image: GuestImage, checkout: Path, say: Say, *, stays: bool
) -> Machine:
    """One try; what it leaves in ``folder`` is the caller's to remove."""
    token = secrets.token_hex(16)
    plan = {"token": token, "image": guest_image.id}
    initrd = folder / "initrd"
    initrd.touch(mode=0o600)
    files = {
        "overlay/opt/rdmalab/boot.py": disks.ADDED / "boot.py",
        "overlay/opt/rdmalab/processors.py": disks.ROOT / "rdmalab/hostside/processors.py",
        "overlay/opt/rdmalab/plan.json": json.dumps(plan).encode(),
    }
    initrd.write_bytes((made / "initrd").read_bytes() + write_cpio(files))
    found = qemu.find_qemu()
    accel = qemu.choose_accel(guest_image, found)
    say(f"booting the test machine under {accel.name} ({accel.why})")
    with scratch() as disk:
        lent = {"checkout": checkout, "image": guest_image.folder}
        line = command(found, accel, made, initrd, folder, disk, lent)
        with launched(folder, line if stays else leashed(line), disk) as port:
            event = port.read(BOOT_S[accel.name], say)
            if event.get("event") != "ready":
                raise BackendError(f"The test machine could not be set up: {event.get('why')}")
            with qmp.monitor(folder / "qmp.sock") as monitor:
                forwarded = qmp.forwards(monitor)[PORT]
    return Machine(str(folder), forwarded, token)


@contextlib.contextmanager
def scratch() -> Iterator[int]:
    """An empty disk without a name: it vanishes with the last process that has it open."""
    with tempfile.TemporaryFile(dir=cache_dir()) as file:
        file.truncate(SCRATCH_BYTES)
        yield file.fileno()


def command(
    found: qemu.Qemu,
    accel: qemu.Accel,
    made: Path,
    initrd: Path,
    folder: Path,
    scratch_disk: int,
    lent: Mapping[str, Path],
) -> list[str]:
    """QEMU's command line. ``lent``: folders of this machine, read-only, by their 9p tag."""
    esc = qemu.escape
    line = [*qemu.base_command(found, accel, qemu.cpus()), "-m", f"{RAM_MIB}M"]
    line += ["-kernel", str(made / "kernel"), "-initrd", str(initrd)]
    line += ["-append", qemu.kernel_line()]
    fixed = "format=raw,readonly=on"
    drives = {
        "root": f"file={esc(made / 'root.erofs')},{fixed}",
        "site": f"file={esc(made / 'site.erofs')},{fixed}",
        "scratch": f"file=/proc/self/fd/{scratch_disk},format=raw,cache=unsafe",
    }
    for name, what in drives.items():
        line += ["-drive", f"{what},if=none,id={name}", "-device", f"virtio-blk-pci,drive={name}"]
    for tag, path in lent.items():
        line += ["-fsdev", f"local,id={tag},path={esc(path)},security_model=none,readonly=on"]
        line += ["-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]
    line += ["-netdev", f"user,id=net,restrict=on,net={NETWORK},hostfwd=tcp:127.0.0.1:0-:{PORT}"]
    line += ["-device", "virtio-net-pci,netdev=net,romfile=", "-device", "virtio-serial-pci"]
    line += ["-chardev", f"socket,id=boot,path={esc(folder / 'boot.sock')}"]
    line += ["-device", "virtserialport,chardev=boot,name=org.rdmalab.boot"]
    line += ["-serial", f"file:{folder / 'console.log'}"]
    return [*line, "-qmp", f"unix:{esc(folder / 'qmp.sock')},server=on,wait=off"]


# ---------------------------------------------------------------- by hand


def main(words: Sequence[str]) -> int:
    """``up``, ``run COMMAND``, ``down``; the exit code of the command, or 1."""
    kept = runtime_dir() / f"{NAME}.json"
    running = Machine(**json.loads(kept.read_text())) if kept.exists() else None
    if list(words) == ["up"] and not running:
        machine = boot(disks.ROOT, tell, stays=True)
        kept.touch(mode=0o600)
        kept.write_text(json.dumps(asdict(machine)))
    elif list(words) == ["down"] and running:
        kept.unlink()
        running.end()
    elif len(words) == 2 and words[0] == "run":
        with contextlib.nullcontext(running) if running else started(say=tell) as machine:
            return machine.run(words[1], timeout_s=3600, check=False, hear=pass_on).code
    elif list(words) not in (["up"], ["down"]):
        raise UsageError("Say up, run COMMAND or down.")
    return 0


def tell(text: str) -> None:
    """What goes on, for who waits."""
    print(f"test machine: {text}", file=sys.stderr, flush=True)


def pass_on(kind: str, data: bytes) -> None:
    """A command's output, as if it had run here."""
    os.write(1 if kind == "o" else 2, data)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except RdmalabError as error:
        sys.exit(f"test machine: {error}")
