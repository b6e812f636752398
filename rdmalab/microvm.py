"""The ``vm`` backend: one QEMU microVM per lab, restored from a snapshot in about a second.

The first start of a set of hosts boots a guest, lets it build the hosts and park their kernels,
and saves it. Every start, the first included, then restores that snapshot, gives the guest
the time, randomness and the lab's identity, and gets back the keys of its kernels.
"""

from __future__ import annotations

import base64
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import limits, overlay, qemu, qmp, shared, snapshot
from .bootport import GuestPanic, collect, launched
from .cpio import write_cpio
from .errors import BackendError
from .image import GuestImage, Step, build_image, find_image
from .paths import runtime_dir
from .state import LabState, discard, lab_folder, process_started, write
from .topology import DESK, HostPlan, mac_addresses

__all__ = ["OTHER_HOSTS", "guests", "runs", "saved_start", "start", "stop"]

CHANNELS = ("shell", "iopub", "stdin", "control", "hb")
CONTROL_PORT = 7000
LOOPBACK = "127.0.0.1"
BASE_RAM_MIB = 320
DESK_RAM_MIB = 112  # for what the desk's kernels share, beside their own
BOOT_TRIES = 3
BOOT_S = {"tcg": 420.0, "kvm": 40.0}  # until the kernels are parked
THAW_S = {"tcg": 60.0, "kvm": 20.0}  # from -incoming until the kernels answer
OTHER_HOSTS = "Stop it (rdmalab down), or start another: rdmalab up --lab ID ..."
Say = Callable[[str], None]


def start(lab: str, hosts: list[HostPlan], say: Say) -> LabState:
    """Bring the hosts up; writes their state file and returns what is in it.

    The desk, if it is wanted, is the last of ``hosts``. ``say`` hears what is going on, in short
    sentences. Raises :class:`BackendError`, :class:`~rdmalab.errors.MachineError` or
    :class:`~rdmalab.errors.ImageError`; then nothing
    of the lab is left.
    """
    begin = time.monotonic()
    image = ensure_image(say)
    machine = plan_machine(image, hosts)
    files = overlay.files(hosts)
    key = snapshot_key(image, machine, files)
    try:
        folder = fresh_folder(lab)
        limits.check_room(machine.ram_mib)
        saved, why_not = snapshot.find(key, machine.qemu.banner)
        saved = saved or shared.find(key, machine.qemu, say)
        if why_not:
            say(f"the saved start of these hosts cannot be used ({why_not}); making a new one")
        restored = saved is not None
        if saved is None:
            saved = cold_start(folder, machine, image, files, key, say)
        try:
            return restore(lab, folder, machine, image, saved, hosts, restored, begin)
        except BackendError:
            if not restored:
                raise
            say("the saved start of these hosts does not load here; making a new one")
            snapshot.remove(saved)
            qmp.end_qemu(folder / "qmp.sock")
            saved = cold_start(folder, machine, image, files, key, say)
            return restore(lab, folder, machine, image, saved, hosts, False, begin)
    except BaseException:
        stop(lab)
        raise


def stop(lab: str) -> bool:
    """End the lab's virtual machine and remove its folder. True if there was anything.

    Works with whatever is left of a lab: QEMU is found by the socket that it listens on.
    """
    folder = lab_folder(lab)
    ended = qmp.end_qemu(folder / "qmp.sock")
    for pid in strays(lab):
        ended = qmp.end_process(pid, lambda pid: pid in strays(lab)) or ended
    collect()
    there = discard(lab)
    snapshot.sweep()
    return ended or there


def runs(state: LabState) -> bool:
    """Whether the process that a state names is that lab's QEMU, and no other that has its pid."""
    return state.alive() and state.pid in strays(state.lab)


def strays(lab: str) -> list[int]:
    """QEMUs of this user that were started for this lab, whatever is left of its folder."""
    return [pid for pid, name in guests().items() if name == lab]


def guests() -> dict[int, str]:
    """All QEMUs that this user's labs here were started with: pid to the lab's id."""
    import psutil

    begin = f",path={qemu.escape(runtime_dir() / 'labs')}/"
    found = {}
    for process in psutil.process_iter(["cmdline", "uids"]):
        info = process.info
        if info["uids"] and info["uids"].real == os.getuid():
            for word in info["cmdline"] or ():
                _, mark, rest = word.partition(begin)
                if mark and rest.endswith("/boot.sock"):
                    found[process.pid] = rest.removesuffix("/boot.sock")
    return found


def ensure_image(say: Say) -> GuestImage:
    """The guest image, built now if it is missing or damaged."""
    from .errors import ImageError

    try:
        image = find_image()
    except ImageError as error:
        say(error.what)
        image = None
    if image is None:
        say("building the guest image (once, about a minute)")
        image = build_image(on_step=by_step(say))
    return image


def by_step(say: Say) -> Callable[[Step], None]:
    """Say a build's steps, each once."""
    said: list[str] = []

    def hear(step: Step) -> None:
        if step.name not in said:
            said.append(step.name)
            say(f"guest image, step {step.number} of {step.total}: {step.name}")

    return hear


def plan_machine(image: GuestImage, hosts: list[HostPlan]) -> qemu.Machine:
    """The virtual machine for these hosts."""
    found = qemu.find_qemu()
    accel = qemu.choose_accel(image, found)
    ram = BASE_RAM_MIB + sum(host.memory_mib for host in hosts)
    ram += DESK_RAM_MIB if DESK in hosts else 0
    ports = [CONTROL_PORT]
    ports += [
        CONTROL_PORT + 100 + 10 * i + c for i in range(len(hosts)) for c in range(len(CHANNELS))
    ]
    return qemu.Machine(found, accel, qemu.CPUS, ram, tuple(ports))


def snapshot_key(image: GuestImage, machine: qemu.Machine, files: dict[str, bytes]) -> str:
    """The key of the saved start of this machine with these files of ours in it."""
    return snapshot.snapshot_key(image.content, overlay.digest(files), machine.describe())


def saved_start(hosts: list[HostPlan], say: Say) -> tuple[GuestImage, snapshot.Snapshot]:
    """The image and the saved start of these hosts, proved by a start of a lab of its own."""
    lab = f"share-{os.getpid()}"
    start(lab, hosts, say)
    stop(lab)
    image = ensure_image(say)
    machine = plan_machine(image, hosts)
    key = snapshot_key(image, machine, overlay.files(hosts))
    saved = snapshot.find(key, machine.qemu.banner)[0] or shared.find(key, machine.qemu, say)
    if saved is None:
        raise BackendError("These hosts' saved start is gone already.", next_step="Try again.")
    return image, saved


def fresh_folder(lab: str) -> Path:
    """The lab's folder, empty, with nothing of an earlier start running in it."""
    stop(lab)
    folder = lab_folder(lab)
    folder.mkdir(mode=0o700, parents=True)
    return folder


def cold_start(
    folder: Path,
    machine: qemu.Machine,
    image: GuestImage,
    files: dict[str, bytes],
    key: str,
    say: Say,
) -> snapshot.Snapshot:
    """Boot a guest until its kernels are parked, save it, end it.

    A guest whose kernel panics while it boots gets another try: emulated processors in threads of
    their own can lose a race with a kernel that patches its own code (``hostside/processors.py``).
    """
    how = machine.accel
    with snapshot.make(machine.ram_mib) as new, snapshot.memory(machine.ram_mib << 20) as ram:
        say(f"first start of these hosts: booting a guest under {how.name} ({how.why})")
        initrd = new.folder / "initrd"
        initrd.write_bytes(image.initrd.read_bytes() + write_cpio(files))
        line = qemu.command(machine, image, folder, initrd, in_memory(ram), restore=False)
        for attempt in range(1, BOOT_TRIES + 1):
            try:
                boot_and_save(folder, line, ram, new, BOOT_S[how.name], say)
                break
            except GuestPanic as panic:
                if attempt == BOOT_TRIES:
                    raise
                say(f"the guest's kernel panicked as it booted; trying again ({panic.log})")
                snapshot.clear(ram)
        initrd.unlink()
        return snapshot.publish(new, key, machine.qemu.banner)


def in_memory(fd: int) -> Path:
    """The path by which a process that has inherited the descriptor opens it."""
    return Path(f"/proc/self/fd/{fd}")


def boot_and_save(
    folder: Path, line: list[str], ram: int, new: snapshot.Snapshot, deadline_s: float, say: Say
) -> None:
    """One boot, up to the saved state. ``ram``: the descriptor of the guest's memory."""
    try:
        with launched(folder, line, ram) as boot:
            event = boot.read(deadline_s, say)
            if event.get("event") != "parked":
                raise BackendError(f"The guest says {event} instead of being ready.")
            say("the hosts are built; saving this moment for the next starts")
            with qmp.monitor(folder / "qmp.sock") as monitor:
                qmp.migrate_out(monitor, new.state)
    finally:
        qmp.end_qemu(folder / "qmp.sock")
    snapshot.keep(ram, new.ram)


def thaw_order(lab: str, machine: qemu.Machine, hosts: list[HostPlan]) -> dict[str, Any]:
    """What makes a restored guest this lab's: its name, time, randomness and addresses."""
    return {
        "op": "thaw",
        "lab": lab,
        "time": time.time(),
        "cpus": min(qemu.CPUS, limits.processors()),
        "seed": base64.b64encode(secrets.token_bytes(64)).decode(),
        "macs": mac_addresses(str(os.getuid()), lab, [h.name for h in hosts if h != DESK]),
        "machine": {"accel": machine.accel.name, "accel_why": machine.accel.why},
    }


def restore(
    lab: str,
    folder: Path,
    machine: qemu.Machine,
    image: GuestImage,
    saved: snapshot.Snapshot,
    hosts: list[HostPlan],
    restored: bool,
    begin: float,
) -> LabState:
    """Start QEMU from a snapshot and make the guest this lab's; writes and returns the state.

    ``restored`` and ``begin`` are facts about the whole start, for the state.
    """
    line = qemu.command(machine, image, folder, image.initrd, saved.ram, restore=True)
    with launched(folder, line) as boot:
        with qmp.monitor(folder / "qmp.sock") as monitor:
            qmp.migrate_in(monitor, saved.state)
            boot.send(thaw_order(lab, machine, hosts))
            ports = qmp.forwards(monitor)
            event = boot.read(THAW_S[machine.accel.name], lambda _: None)
        if event.get("event") != "ready":
            raise BackendError(f"The guest says {event} instead of being ready.")
        for host in [*event["hosts"], *([event["desk"]] if "desk" in event else [])]:
            outside = {n: ports[p] for n, p in host["kernel"]["ports"].items()}
            host["kernel"].update(ip=LOOPBACK, ports=outside)
        state = LabState(
            lab=lab,
            backend="vm",
            accel=machine.accel.name,
            accel_why=machine.accel.why,
            restored=restored,
            ready_s=round(time.monotonic() - begin, 2),
            pid=boot.pid,
            started=process_started(boot.pid) or 0.0,
            hosts=event["hosts"],
            control={"ip": LOOPBACK, "port": ports[event["port"]], "curve": event["curve"]},
            desk=event.get("desk"),
        )
        write(state)
        boot.send({"op": "commit"})
    return state
