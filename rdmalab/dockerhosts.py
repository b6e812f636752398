"""The ``docker`` backend: each host a Docker container, on this machine's own kernel.

::

    rdmalab-...-switch     NET_ADMIN, NET_RAW   the wire's network: br0, v-alice, v-bob
    rdmalab-...-net-alice  NET_ADMIN, NET_RAW   alice's network: eth0, rxe_alice
    rdmalab-...-alice      no right             alice: joins that network; her own uverbs device

No container is privileged, has the Docker socket, or has a network that leads anywhere: the wire is
inside the switch's own network namespace, so addresses are always free and two labs never meet.
The first two kinds run ``hostside/keeper.py``, hosts run ``hostside/lodger.py``, and all of them
end, and are removed by the engine, when the lab's steward does. It takes a kernel whose rxe knows
network namespaces: Linux 7.1 or newer.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from . import dockerengine, dockerimage, dockerproof, microvm, stewards
from .errors import BackendError, MachineError
from .state import LabState, lab_folder
from .stewards import CODE, Say
from .topology import HostPlan

__all__ = ["OTHER_HOSTS", "runs", "start", "stop"]

OTHER_HOSTS = microvm.OTHER_HOSTS
HOME = "/home/learner"
CALLS = "/lab"  # a container's folder of the lab, with the steward's socket in it
LEARNER = (1000, 1000)  # where the lab's owner is root; else hosts have the owner's uid
INIT_MIB = 96  # what a host's first process has imported; its kernels share it
KEEPER_MIB = 96
KEEPER_PIDS = 64
GONE_S = 60.0
# What a learner can write to, each with its part of a host's memory, which files count as.
FOLDERS = {HOME: 0.2, "/tmp": 0.15, "/dev/shm": 0.1, "/var/tmp": 0.05, "/run": 0.01}
ROOT = Path("/")
runs = stewards.runs


def start(lab: str, hosts: list[HostPlan], say: Say) -> LabState:
    """Bring the hosts up; writes their state file and returns what is in it.

    Raises :class:`~rdmalab.errors.MachineError` where this machine cannot do it, and
    :class:`~rdmalab.errors.BackendError`; then nothing of the lab is left.
    """
    begin = time.monotonic()
    stewards.no_desk(hosts, "docker")
    need_kernel()
    with contextlib.closing(dockerengine.connect()) as client:
        image = dockerimage.ensure(client, microvm.ensure_image(say), say)
        stop(lab)
        microvm.stop(lab)
        try:
            facts = {"lab": lab, "backend": "docker", "accel": "native", "begin": begin}
            why = f"hosts are containers on this machine's kernel {platform.release()}"
            plan = stewards.plan(lab, hosts, [1] * len(hosts))
            with stewards.launched(plan, hosts) as steward:
                steward.expect("listening", say)
                make_networks(client, image, lab, hosts)
                devices = wired(steward, say)
                make_hosts(client, image, plan["hosts"], lab, devices, say)
                return stewards.finish(steward, {**facts, "accel_why": why}, say)
        except BaseException:
            stop(lab)
            raise


def need_kernel(root: Path = ROOT) -> None:
    """:class:`MachineError` where no container could have a device; quick, and nothing is tried."""
    if not (root / "sys/module/rdma_rxe").is_dir():
        raise MachineError(
            f"This machine's kernel ({platform.release()}) has not loaded rdma_rxe.",
            next_step="`sudo modprobe rdma_rxe` (it takes Linux 7.1 or newer), or the vm backend.",
        )


def stop(lab: str) -> bool:
    """End the lab and remove its containers and its folder. True if there was anything."""
    folder = lab_folder(lab)
    asked = not folder.exists() or (folder / "ns").exists()
    ended = stewards.stop(lab)
    if not (asked and dockerengine.reachable()):
        return ended
    try:
        client = dockerengine.connect()
    except MachineError:
        return ended  # an engine that does not run holds nothing
    with contextlib.closing(client), dockerengine.explained("to remove the lab's containers"):
        end = time.monotonic() + GONE_S
        while dockerengine.remove(client, lab):
            ended = True
            if time.monotonic() > end:
                left = ", ".join(c["Names"][0] for c in dockerengine.ours(client, lab))
                raise BackendError(
                    f"Docker has not removed these containers in {GONE_S:.0f} s: {left}.",
                    next_step="`docker ps -a` shows their state; restarting the engine ends them.",
                )
            time.sleep(0.1)
    return ended


# --- what containers are made of: pure -----------------------------------------------------------


def name_of(lab: str, part: str) -> str:
    """A container's name, which no other user's or folder's lab has."""
    place = hashlib.sha256(str(lab_folder(lab)).encode()).hexdigest()[:6]
    return f"rdmalab-{lab}-{place}-{part}"


def any_spec(
    lab: str, image: str, part: str, place: str, command: list[str], mode: str = "rw"
) -> dict[str, Any]:
    """What every container of a lab has: no rights, a read-only root, our code, its folder."""
    folder = lab_folder(lab)
    return {
        "image": image,
        "name": name_of(lab, part),
        "command": command,
        "labels": dockerengine.labels(lab),
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "read_only": True,
        "auto_remove": True,
        "environment": {"PYTHONPATH": "/opt/rdmalab", "PYTHONDONTWRITEBYTECODE": "1"},
        "volumes": {
            str(folder / CODE): {"bind": "/opt/rdmalab", "mode": "ro"},
            str(folder / "hosts"): {"bind": "/etc/hosts", "mode": "ro"},
            str(folder / place): {"bind": CALLS, "mode": mode},
        },
    }


def keeper_spec(lab: str, image: str, part: str, place: str) -> dict[str, Any]:
    """The container of a network: root in it, with the right to change that network only."""
    line = f"exec python3 -m rdmalab.keeper keep {CALLS} 2>>{CALLS}/log"
    command = ["sh", "-c", line]
    return {
        **any_spec(lab, image, part, place, command),
        "user": "0:0",
        "cap_add": ["NET_ADMIN", "NET_RAW"],
        "network_mode": "none",
        "mem_limit": f"{KEEPER_MIB}m",
        "pids_limit": KEEPER_PIDS,
    }


def switch_spec(lab: str, image: str) -> dict[str, Any]:
    """The container in whose network the wire is.

    It may look at the other keepers' namespaces (/proc/PID/ns) as long as it has the same rights.
    """
    return keeper_spec(lab, image, "switch", "ns")


def network_spec(lab: str, image: str, index: int, host: HostPlan) -> dict[str, Any]:
    """The container of a host's network. It shares the switch's list of processes, so that the
    switch can name it as the other end of a cable."""
    return {
        **keeper_spec(lab, image, f"net-{host.name}", f"n{index}"),
        "pid_mode": f"container:{name_of(lab, 'switch')}",
        "hostname": host.name,
        "sysctls": {"net.ipv4.ping_group_range": "0 2147483647"},
    }


def host_spec(
    lab: str,
    image: str,
    index: int,
    host: dict[str, Any],
    order: str,
    nodes: list[str],
    hidden: list[str],
) -> dict[str, Any]:
    """A host. ``host``: its spec; ``order``: for its first process; ``nodes``: its devices;
    ``hidden``: folders of other devices in sysfs."""
    uid, gid = (os.getuid(), os.getgid()) if os.getuid() else LEARNER
    files = f"rw,exec,nosuid,nodev,uid={uid},gid={gid},mode="
    size = {folder: int(host["memory_mib"] * 1024 * part) for folder, part in FOLDERS.items()}
    command = ["python3", "-m", "rdmalab.lodger", order]
    memory = f"{host['memory_mib'] + INIT_MIB}m"
    return {
        **any_spec(lab, image, host["name"], f"h{index}", command, mode="ro"),
        "user": f"{uid}:{gid}",
        "network_mode": "container:" + name_of(lab, f"net-{host['name']}"),
        "devices": [f"{node}:{node}:rw" for node in nodes],
        "tmpfs": {
            **{
                folder: f"{files}{'700' if folder == HOME else '1777'},size={kib}k"
                for folder, kib in size.items()
            },
            **dict.fromkeys(hidden, "ro,size=4k,mode=000"),
        },
        "mem_limit": memory,
        "memswap_limit": memory,
        "pids_limit": host["pids"],
    }


# --- making them ---------------------------------------------------------------------------------


def make_networks(client: Any, image: str, lab: str, hosts: list[HostPlan]) -> None:
    """The switch, and a network for each host."""
    lines = ["127.0.0.1\tlocalhost", *(f"{host.ip}\t{host.name}" for host in hosts)]
    file = lab_folder(lab) / "hosts"
    file.write_text("\n".join([*lines, ""]))
    file.chmod(0o644)
    run(client, switch_spec(lab, image))
    with ThreadPoolExecutor() as pool:
        specs = [network_spec(lab, image, index, host) for index, host in enumerate(hosts)]
        list(pool.map(lambda spec: run(client, spec), specs))


def wired(steward: stewards.StewardPort, say: Say) -> list[str]:
    """The devices that the keepers have made; an error that says why there is none."""
    try:
        devices: list[str] = steward.expect("wired", say)["devices"]
        return devices
    except BackendError:
        if "rdma link add" not in steward.detail:
            raise
        why, step = dockerproof.reason(3, steward.detail.rpartition(": ")[2])
        raise MachineError(f"Hosts cannot have devices here: {why}.", next_step=step) from None


def make_hosts(
    client: Any, image: str, specs: list[dict[str, Any]], lab: str, devices: list[str], say: Say
) -> None:
    """A container for each host, with its own device; says it if they may pin little memory."""
    made = []
    for index, (spec, device) in enumerate(zip(specs, devices, strict=True)):
        order = {"spec": {**spec, "device": device}, "call": f"{CALLS}/call", "home": HOME}
        words = json.dumps({**order, "port": 1, "alone": True})
        made.append(host_spec(lab, image, index, spec, words, nodes_of(device), others(device)))
    limit = pinning(client, made[0], say)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda spec: run(client, {**spec, **limit}), made[1:]))


def pinning(client: Any, spec: dict[str, Any], say: Say) -> dict[str, Any]:
    """Start a host with no limit on pinned memory, or with the engine's where it must not raise it.

    Returns what the other hosts' containers need for the same.
    """
    from docker.types import Ulimit

    limit = {"ulimits": [Ulimit(name="memlock", soft=-1, hard=-1)]}
    try:
        run(client, {**spec, **limit})
        return limit
    except BackendError as error:
        if "rlimit" not in error.what:
            raise
    dockerengine.remove_one(client, spec["name"])
    run(client, spec)
    say(
        "the Docker engine may not raise the limit on pinned memory (memlock), so hosts have its"
        " own, often 8 MiB; `LimitMEMLOCK=infinity` in the engine's service would change that"
    )
    return {}


def nodes_of(device: str, root: Path = ROOT) -> list[str]:
    """The device nodes that a host needs for its RDMA device. Numbers are reused, so: look."""
    for entry in (root / "sys/class/infiniband_verbs").glob("uverbs*"):
        if (entry / "ibdev").read_text().strip() == device:
            return [f"/dev/infiniband/{entry.name}", "/dev/infiniband/rdma_cm"]
    raise BackendError(
        f"The device {device} was made, and has no verbs interface on this machine.",
        next_step="`sudo modprobe ib_uverbs rdma_ucm`",
    )


def others(device: str, root: Path = ROOT) -> list[str]:
    """Where in sysfs all other RDMA devices are: every container would see them."""
    found = (root / "sys/class/infiniband").iterdir()
    return sorted(os.path.realpath(entry) for entry in found if entry.name != device)


def run(client: Any, spec: dict[str, Any]) -> None:
    """Create and start one container."""
    with dockerengine.explained(f"to start {spec['name']}"):
        client.containers.create(**spec).start()
