"""The test machine, saved at a good moment: dockerd runs, and the hosts' image is in it.

The first start boots the disks, has the checkout make the hosts' image, lets go of all that belongs
to one run (the folders lent over 9p, the token), and saves memory, devices and Docker's disk as a
lab's guest is saved (rdmalab/snapshot.py). Every start, the first included, restores that; what a
run writes to the disk is thrown away with it.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rdmalab import image, qemu, qmp, snapshot
from rdmalab.bootport import BootPort, GuestPanic, launched
from rdmalab.cpio import write_cpio
from rdmalab.errors import BackendError
from rdmalab.leash import leashed
from rdmalab.manifest import GuestImage

from . import disks
from .orders import Machine

__all__ = ["Parts", "find_or_save", "restore"]

NAME = "test-machine"
PORT = 7000  # as in guest/boot.py
NETWORK = "192.168.76.0/24"  # labs take addresses of 10.0.0.0/8
RAM_MIB = 2048
DISK_BYTES = 8 << 30  # sparse: Docker's images and containers
BOOT_TRIES = 3
DEADLINES_S = {"tcg": 300.0, "kvm": 60.0}
MAKE_IMAGE_S = 600.0
SAVE_S = 120.0
# The last line is for speed: what these import is then compiled, and in memory.
MAKE_IMAGE = (
    "from rdmalab import dockerengine, dockerimage, image\n"
    "dockerimage.ensure(dockerengine.connect(), image.find_image(), print)\n"
    "import ipykernel.kernelapp, nbclient, nbgrader.utils, pytest, rdmalab.cli"
)
# What is in a saved machine besides the disks: this code has made it.
BAKED = (
    "rdmalab/dockerimage.py",
    "rdmalab/hostside/processors.py",
    "tests/backends/guest/boot.py",
    "tests/backends/saved.py",
)

Say = Callable[[str], None]


@dataclass(frozen=True)
class Parts:
    """What a test machine is made of. ``made``: the folder of its disks; ``key``: all that a saved
    machine depends on."""

    machine: qemu.Machine
    made: Path
    image: GuestImage
    checkout: Path
    key: str

    @classmethod
    def found(cls, checkout: Path, say: Say) -> Parts:
        """What this machine has, built now if it has not."""
        made = disks.find_or_make(say)
        guest_image = image.find_image() or image.build_image()
        found = qemu.find_qemu()
        accel = qemu.choose_accel(guest_image, found)
        machine = qemu.Machine(found, accel, qemu.CPUS, RAM_MIB, (PORT,))
        digest = hashlib.sha256(b"".join((disks.ROOT / name).read_bytes() for name in BAKED))
        facts = (machine.describe(), made.name, guest_image.id, digest.hexdigest())
        return cls(machine, made, guest_image, checkout, snapshot.snapshot_key(NAME, *facts))

    @property
    def deadline_s(self) -> float:
        """For the machine to boot, or to wake up."""
        return DEADLINES_S[self.machine.accel.name]

    def line(self, folder: Path, disk: Path, ram: Path, *, restored: bool) -> list[str]:
        """QEMU's command line. A restored machine writes neither to its disk nor to its memory."""
        esc, share = qemu.escape, "off" if restored else "on"
        line = qemu.base_command(self.machine.qemu, self.machine.accel, self.machine.cpus)
        line[2] += ",memory-backend=ram"
        memory = f"size={RAM_MIB}M,mem-path={esc(ram)},share={share}"
        line += ["-m", f"{RAM_MIB}M", "-object", f"memory-backend-file,id=ram,{memory}"]
        line += ["-kernel", str(self.made / "kernel"), "-initrd", str(folder / "initrd")]
        line += ["-append", qemu.kernel_line()]
        drives = {
            "root": f"file={esc(self.made / 'root.erofs')},readonly=on",
            "site": f"file={esc(self.made / 'site.erofs')},readonly=on",
            "docker": f"file={esc(disk)},cache=unsafe,snapshot={'on' if restored else 'off'}",
        }
        for name, what in drives.items():
            line += ["-drive", f"{what},format=raw,if=none,id={name}"]
            line += ["-device", f"virtio-blk-pci,drive={name}"]
        for tag, path in {"checkout": self.checkout, "image": self.image.folder}.items():
            line += ["-fsdev", f"local,id={tag},path={esc(path)},security_model=none,readonly=on"]
            line += ["-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]
        forward = f"restrict=on,net={NETWORK},hostfwd=tcp:127.0.0.1:0-:{PORT}"
        line += ["-netdev", f"user,id=net,{forward}"]
        line += ["-device", "virtio-net-pci,netdev=net,romfile=", "-device", "virtio-serial-pci"]
        line += ["-chardev", f"socket,id=boot,path={esc(folder / 'boot.sock')}"]
        line += ["-device", "virtserialport,chardev=boot,name=org.rdmalab.boot"]
        line += ["-serial", f"file:{folder / 'console.log'}"]
        line += ["-qmp", f"unix:{esc(folder / 'qmp.sock')},server=on,wait=off"]
        return line + (["-incoming", "defer"] if restored else [])

    def write_initrd(self, folder: Path) -> None:
        """The disks' initrd, with process 1 laid over."""
        files = {
            "overlay/opt/rdmalab/boot.py": disks.ADDED / "boot.py",
            "overlay/opt/rdmalab/processors.py": disks.ROOT / "rdmalab/hostside/processors.py",
        }
        (folder / "initrd").write_bytes((self.made / "initrd").read_bytes() + write_cpio(files))


def find_or_save(parts: Parts, folder: Path, say: Say) -> snapshot.Snapshot:
    """The saved machine; made now, in two minutes or so, if it is not there."""
    parts.write_initrd(folder)
    banner = parts.machine.qemu.banner
    saved, _ = snapshot.find(parts.key, banner)
    if saved:
        return saved
    how = parts.machine.accel
    say(f"booting the test machine under {how.name} ({how.why})")
    with snapshot.make(RAM_MIB) as new, snapshot.memory(RAM_MIB << 20) as ram:
        for attempt in range(1, BOOT_TRIES + 1):
            try:
                make(parts, folder, new, ram, say)
                break
            except GuestPanic as panic:  # see rdmalab/hostside/processors.py
                if attempt == BOOT_TRIES:
                    raise
                say(f"the kernel panicked as it booted; trying again ({panic.log})")
                snapshot.clear(ram)
            finally:
                qmp.end_qemu(folder / "qmp.sock")
        snapshot.keep(ram, new.ram)
        return snapshot.publish(new, parts.key, banner)


def make(parts: Parts, folder: Path, new: snapshot.Snapshot, ram: int, say: Say) -> None:
    """One boot, up to the moment that is saved. ``ram``: the descriptor of the memory."""
    disk = disk_of(new)
    disk.unlink(missing_ok=True)
    with open(disk, "wb") as file:
        file.truncate(DISK_BYTES)
    line = parts.line(folder, disk, Path(f"/proc/self/fd/{ram}"), restored=False)
    with launched(folder, leashed(line), ram) as port:
        expect(port, "booted", parts.deadline_s, say)
        with qmp.monitor(folder / "qmp.sock", SAVE_S) as monitor:
            machine = join(parts, folder, port, monitor)
            say("making the hosts' Docker image in it (once, a minute or two)")
            machine.run(["python3", "-c", MAKE_IMAGE], timeout_s=MAKE_IMAGE_S)
            say("saving it for the next starts")
            port.send({"op": "leave"})
            expect(port, "left", parts.deadline_s, say)
            qmp.migrate_out(monitor, new.state, SAVE_S)


def restore(parts: Parts, folder: Path, saved: snapshot.Snapshot, *, stays: bool) -> Machine:
    """Start from a saved machine, with folders and a token of this run."""
    line = parts.line(folder, disk_of(saved), saved.ram, restored=True)
    with (
        launched(folder, line if stays else leashed(line)) as port,
        qmp.monitor(folder / "qmp.sock", SAVE_S) as monitor,
    ):
        qmp.migrate_in(monitor, saved.state)
        return join(parts, folder, port, monitor)


def disk_of(saved: snapshot.Snapshot) -> Path:
    """Docker's disk, as it was when the memory was saved."""
    return saved.folder / "docker.ext4"


def join(parts: Parts, folder: Path, port: BootPort, monitor: qmp.Monitor) -> Machine:
    """Give the machine what is this run's: the time, the lent folders, a token."""
    token = secrets.token_hex(16)
    seed = secrets.token_hex(64)
    order = {"op": "join", "time": time.time(), "seed": seed, "image": parts.image.id}
    port.send({**order, "token": token})
    expect(port, "ready", parts.deadline_s, lambda _: None)
    return Machine(str(folder), qmp.forwards(monitor)[PORT], token)


def expect(port: BootPort, event: str, deadline_s: float, say: Say) -> None:
    """Wait for what the machine should say next; BackendError if it says another thing."""
    said: Mapping[str, object] = port.read(deadline_s, say)
    if said.get("event") != event:
        raise BackendError(f"The test machine could not be set up: {said.get('why', said)}")
