"""QEMU on this machine: which one, what it can do, and the command line of a lab's machine.

KVM is believed only after a trial boot: on some machines ``/dev/kvm`` opens, and a guest hangs
or QEMU aborts all the same. The verdict is kept per QEMU and kernel version.
``RDMALAB_ACCEL=tcg`` or ``kvm`` overrides it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import MachineError, UsageError
from .image import GuestImage
from .leash import leashed
from .paths import cache_dir

__all__ = [
    "CPUS",
    "MAPS_READ_ONLY",
    "Accel",
    "Machine",
    "Qemu",
    "choose_accel",
    "command",
    "find_qemu",
    "kvm_verdict",
]

OLDEST = (7, 2)
MAPS_READ_ONLY = (8, 2)  # a file that may not be written, as memory that may (rom=off)
KVM_TRIAL_S = 8.0
PROBE_WORD = "RDMALAB-PROBE-OK"
# A versioned machine and a named CPU: a snapshot then fits other QEMU versions too.
MACHINES = {
    "amd64": ("qemu-system-x86_64", "pc-q35-7.2", "Nehalem-v1", "ttyS0"),
    "arm64": ("qemu-system-aarch64", "virt-7.2,gic-version=3", "cortex-a72", "ttyAMA0"),
}
# Every guest has two processors, so that a saved start fits every machine and container; of these
# it uses no more than it is allowed (``limits.processors``), since more ruin the latency.
CPUS = 2
TB_SIZE_MIB = 128  # translated code kept by TCG; its default may take a quarter of the memory


@dataclass(frozen=True)
class Qemu:
    """A QEMU program: where, its version as numbers, and as it prints it."""

    path: str
    version: tuple[int, int]
    banner: str


@dataclass(frozen=True)
class Accel:
    """``kvm`` or ``tcg``, and why in a few words."""

    name: str
    why: str


@dataclass(frozen=True)
class Machine:
    """What a lab's virtual machine is made of; everything here is part of a snapshot's key."""

    qemu: Qemu
    accel: Accel
    cpus: int
    ram_mib: int
    guest_ports: tuple[int, ...]

    def describe(self) -> str:
        """One line for the snapshot's key: what the saved state depends on."""
        _, machine, cpu, _ = MACHINES[debian_arch()]
        facts = (self.qemu.banner, machine, cpu, self.accel.name, self.cpus, self.ram_mib)
        return json.dumps(
            [*facts, self.guest_ports, host_cpu() if self.accel.name == "kvm" else ""]
        )


def debian_arch() -> str:
    """This machine's architecture in Debian's words; :class:`MachineError` for another one."""
    arch = {"x86_64": "amd64", "aarch64": "arm64", "arm64": "arm64"}.get(platform.machine())
    if arch is None:
        raise MachineError(f"No guest image exists for the architecture {platform.machine()}.")
    return arch


def host_cpu() -> str:
    """The processor's name: a snapshot made under KVM holds its features."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    return next((line for line in text.splitlines() if line.startswith("model name")), "")


@functools.lru_cache(maxsize=4)
def find_qemu(program: str = "") -> Qemu:
    """The QEMU for this architecture. ``RDMALAB_QEMU`` names another program.

    Raises :class:`MachineError` if there is none, or it is older than 7.2.
    """
    name = program or os.environ.get("RDMALAB_QEMU") or MACHINES[debian_arch()][0]
    path = shutil.which(name)
    if path is None:
        raise MachineError(f"{name} is not installed.", next_step="Run: rdmalab doctor --fix")
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MachineError(f"{path} does not run ({error}).") from None
    banner = (done.stdout.splitlines() or [""])[0]
    found = re.search(r"version (\d+)\.(\d+)", banner)
    if not found:
        raise MachineError(f"{path} does not tell its version (it says {banner!r}).")
    version = (int(found[1]), int(found[2]))
    if version < OLDEST:
        raise MachineError(
            f"{path} is version {version[0]}.{version[1]}; rdmalab needs 7.2 or newer.",
            next_step="Install a newer QEMU, or name one in RDMALAB_QEMU.",
        )
    return Qemu(path, version, banner)


def choose_accel(image: GuestImage, qemu: Qemu) -> Accel:
    """KVM if it is proved, else emulation, with the reason."""
    wanted = os.environ.get("RDMALAB_ACCEL", "")
    if wanted in ("tcg", "kvm"):
        return Accel(wanted, f"RDMALAB_ACCEL={wanted}")
    if wanted:
        raise UsageError(f"RDMALAB_ACCEL is {wanted!r}; it can be tcg or kvm.")
    return kvm_verdict(image, qemu)


def kvm_verdict(image: GuestImage, qemu: Qemu) -> Accel:
    """Whether KVM really runs this guest, by a short trial boot; remembered."""
    if not os.path.exists("/dev/kvm"):
        return Accel("tcg", "this machine has no /dev/kvm")
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return Accel("tcg", "/dev/kvm may not be opened by this user (join the group kvm)")
    facts = (qemu.banner, platform.release(), host_cpu(), image.id)
    key = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    memo = cache_dir() / "kvm" / f"{key}.json"
    try:
        kept = json.loads(memo.read_text())
        return Accel(kept["name"], kept["why"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    failure = try_kvm(image, qemu)
    verdict = (
        Accel("tcg", f"KVM is there but does not work: {failure}")
        if failure
        else Accel("kvm", "a trial boot under KVM succeeded")
    )
    with contextlib.suppress(OSError):  # a full disk costs the next start some seconds, no more
        memo.parent.mkdir(parents=True, exist_ok=True)
        memo.write_text(json.dumps(verdict.__dict__))
    return verdict


def try_kvm(image: GuestImage, qemu: Qemu) -> str:
    """Boot the kernel and its initrd under KVM; the empty string if they came up, else why not."""
    line = [*base_command(qemu, Accel("kvm", ""), 1), "-m", "256M", "-serial", "stdio"]
    line += ["-kernel", str(image.kernel), "-initrd", str(image.initrd)]
    line += ["-append", kernel_line("rdmalab.probe")]
    try:
        done = subprocess.run(
            leashed(line), stdin=subprocess.DEVNULL, capture_output=True, timeout=KVM_TRIAL_S
        )
    except subprocess.TimeoutExpired:
        return f"a trial guest did not come up in {KVM_TRIAL_S:.0f} s"
    if PROBE_WORD.encode() in done.stdout:
        return ""
    said = done.stderr.decode(errors="replace").strip().splitlines()
    return f"QEMU ended with {done.returncode}" + (f" ({said[-1][:160]})" if said else "")


def kernel_line(*words: str) -> str:
    """The guest kernel's command line: one processor at first (``hostside/processors.py``)."""
    console = MACHINES[debian_arch()][3]
    first = [f"console={console}", "quiet", "panic=-1", "mitigations=off"]
    return " ".join([*first, "maxcpus=1", "noreplace-smp", *words])


def base_command(qemu: Qemu, accel: Accel, smp: int) -> list[str]:
    """The part of the command line that a trial boot and a lab share."""
    _, machine, cpu, _ = MACHINES[debian_arch()]
    how = "kvm" if accel.name == "kvm" else f"tcg,thread=multi,tb-size={TB_SIZE_MIB}"
    line = [qemu.path, "-machine", machine, "-accel", how, "-cpu", cpu, "-smp", str(smp)]
    return [*line, "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"]


def command(
    machine: Machine, image: GuestImage, folder: Path, initrd: Path, ram: Path, *, restore: bool
) -> list[str]:
    """The command line of a lab's virtual machine.

    ``ram`` is a file with the guest's memory. The first boot shares it (what the guest writes is
    in the file); a restore maps it privately, so that a start costs no copy and any number of
    labs can stand on one file, also on one that they may not write.
    """
    share = "off" if restore else "on"
    memory = (
        f"memory-backend-file,id=ram,size={machine.ram_mib}M,mem-path={escape(ram)},share={share}"
    )
    if restore and os.access(ram, os.R_OK) and not os.access(ram, os.W_OK):
        memory += ",readonly=on,rom=off"
    net = ["user", "id=net", "restrict=on"]
    net += [f"hostfwd=tcp:127.0.0.1:0-:{port}" for port in machine.guest_ports]
    line = base_command(machine.qemu, machine.accel, machine.cpus)
    line[2] += ",memory-backend=ram"
    line += ["-m", f"{machine.ram_mib}M", "-object", memory]
    line += ["-kernel", str(image.kernel), "-initrd", str(initrd), "-append", kernel_line()]
    line += ["-drive", f"file={escape(image.root)},if=none,id=root,format=raw,readonly=on"]
    line += ["-device", "virtio-blk-pci,drive=root"]
    line += ["-netdev", ",".join(net), "-device", "virtio-net-pci,netdev=net,romfile="]
    line += ["-chardev", f"socket,id=boot,path={escape(folder / 'boot.sock')}"]
    line += ["-device", "virtio-serial-pci"]
    line += ["-device", "virtserialport,chardev=boot,name=org.rdmalab.boot"]
    line += ["-device", "vmgenid,guid=auto"] if debian_arch() == "amd64" else []
    line += ["-serial", f"file:{folder / 'console.log'}"]
    line += ["-qmp", f"unix:{escape(folder / 'qmp.sock')},server=on,wait=off"]
    return line + (["-incoming", "defer"] if restore else [])


def escape(path: Path) -> str:
    """A path inside one of QEMU's comma-separated options."""
    return str(path).replace(",", ",,")


def shown(line: Sequence[str]) -> str:
    """The command line as a shell would take it, for logs and learners."""
    return shlex.join(line)
