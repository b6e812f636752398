"""The lab's own process where hosts run on this machine's kernel: what the agent is in a guest.

It belongs to the lab's owner and has no other right. It takes the calls of the hosts (and, with the
``docker`` backend, of the keepers of their networks), makes the wire through the keepers, gives the
kernels their keys, and serves the same control service as a guest's agent. Everything that it
listens on is a Unix socket in the lab's 0700 folder::

    c-1           the control service         0-1 ... 0-5   alice's kernel: its five channels
    h0/call       here alice's first process calls           h0/home, h0/here.json   (local)
    n0/call       here the keeper of alice's network calls   n0/door   the keeper's own socket
    ns/           the same for the keeper of the wire

It is started with one end of a socket pair to the controller, as a guest is with its boot port:
``plan`` in; ``listening``, ``wired`` (docker) and ``ready`` out; ``commit`` in. Should the other
end go away before that, it ends; with it every lodger and keeper, and with those their containers.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import zmq

from . import errands, keeper, netdev_of, network
from .commands import Client
from .control import ControlServer, Door
from .doorway import listen_at
from .hostlink import CHANNELS, HostFailed, HostLink, say
from .network import HostSpec

__all__ = ["Steward"]

START_S = 480  # for a whole start; longer than any controller waits
CALL_S = 120.0  # until a container that was started calls
PARK_S = 240.0  # until what a kernel needs is imported
READY_S = 60.0
SWITCH = "ns"
PLACES = {"h": "a host", "n": "a network's keeper"}
DEVICE_NAMES = 64  # tried for one host: devices of all labs of a kernel have names of their own
# What the kernel says of a name that is taken: EEXIST, or ENFILE of its table of names.
TAKEN = ("exists", "Too many open files")


class Control(ControlServer):
    """The control service of a lab whose networks are kept by keepers, or by nobody."""

    kept: dict[str | None, Path]  # the keepers' folders by host; None: the wire's
    netdevs: dict[str, str]  # of hosts that are processes: this machine's own interfaces

    def inside(self, argv: list[str], host: str | None) -> list[str]:
        """A command line as the keeper of that network runs it."""
        if host not in self.kept:
            raise PermissionError(
                "nobody here has rights over the hosts' network: they are processes of this machine"
            )
        if argv[0] == "tcpdump":  # it would give up rights that a keeper has not got
            argv = ["tcpdump", "-Z", "root", *argv[1:]]
        return keeper.command(self.kept[host], argv)

    def op_errand(self, client: Client, request: dict[str, Any]) -> None:
        """A fault or a capture. On this machine's own interface: a capture, if its owner may."""
        netdev = self.netdevs.get(request["host"])
        match request["argv"]:
            case ["capture", max_packets, snaplen] if netdev:
                line = errands.capture_line(int(max_packets), int(snaplen), netdev)
                self.commands.in_guest(client, request["id"], line)
            case _:
                super().op_errand(client, request)

    def op_exec(self, client: Client, request: dict[str, Any]) -> None:
        """A command on a host, or, as its administrator, beside the host: in its network."""
        if request.get("root"):
            argv = self.inside(request["argv"], request["host"])
            self.commands.in_guest(client, request["id"], argv)
        else:
            super().op_exec(client, request)


class Steward:
    """One lab. ``plan``: lab, folder, hosts (specs, and ports of devices), and, where the hosts are
    just processes, the ``python`` that they run on."""

    def __init__(self, plan: dict[str, Any], controller: socket.socket) -> None:
        self.controller = controller
        self.lab, self.folder = str(plan["lab"]), Path(plan["folder"])
        self.specs = [HostSpec(**facts) for facts in plan["hosts"]]
        self.ports: list[int] = plan["ports"]
        self.python: str | None = plan.get("python")
        self.calls: dict[str, socket.socket] = {}
        self.kept: dict[str | None, Path] = {}
        self.keepers: list[socket.socket] = []
        self.links: list[HostLink] = []

    # --- the wire ---------------------------------------------------------------------------

    def expect(self, place: str) -> None:
        """Listen for the call of a container or process that is going to be started."""
        folder = self.folder / place
        folder.mkdir()
        folder.chmod(0o777)  # its users have other uids; the lab's folder keeps everybody out
        self.calls[place] = listen_at(folder / keeper.CALL, socket.SOCK_SEQPACKET)

    def answer(self, place: str) -> socket.socket:
        """Take the call from there."""
        with self.calls.pop(place) as call:
            call.settimeout(CALL_S)
            try:
                return call.accept()[0]
            except TimeoutError:
                whose = f"the first process of {place} ({PLACES[place[0]]})"
                raise TimeoutError(f"{whose} did not call within {CALL_S:.0f} s") from None

    def meet_keeper(self, place: str, host: str | None) -> int:
        """Take a keeper's call; its pid, as the other keepers know it."""
        caller = self.answer(place)
        pid: int = json.loads(caller.recv(64))["pid"]
        self.keepers.append(caller)  # closed when we end, which ends it
        self.kept[host] = self.folder / place
        return pid

    def wire(self) -> list[str]:
        """Bridge, cables and devices, made by the keepers; the names of the devices."""
        self.meet_keeper(SWITCH, None)
        spaces = {
            spec.name: str(self.meet_keeper(f"n{index}", spec.name))
            for index, spec in enumerate(self.specs)
        }
        for command, lines, host in network.commands(self.specs, spaces):
            if command[0] == "rdma":
                continue
            network.run(keeper.command(self.kept[host], command), lines)
        self.specs = [self.make_device(spec) for spec in self.specs]
        return [spec.device for spec in self.specs]

    def make_device(self, spec: HostSpec) -> HostSpec:
        """The host's own device, with the first free name; the host with that name."""
        for number in range(1, DEVICE_NAMES):
            device = spec.device if number == 1 else f"{spec.device}_{number}"
            named = dataclasses.replace(spec, device=device)
            try:
                (line,) = network.device_plan(named)
                network.run(keeper.command(self.kept[spec.name], ["rdma", *line.split()]))
                return named
            except RuntimeError as error:
                if not any(word in str(error) for word in TAKEN):
                    raise
        raise RuntimeError(f"there are {DEVICE_NAMES} devices named {spec.device} already")

    # --- the hosts --------------------------------------------------------------------------

    def lodge(self, index: int, spec: HostSpec) -> HostLink:
        """Take the call of a host's first process and hand it its sockets."""
        if self.python:
            self.start_process(index, spec)
        caller = self.answer(f"h{index}")
        listeners = {
            name: listen_at(self.folder / f"{index}-{number}")
            for number, name in enumerate(CHANNELS, start=1)
        }
        fds = [sock.fileno() for sock in listeners.values()]
        socket.send_fds(caller, [b"welcome"], fds)
        return HostLink(spec, index, caller, listeners, port=self.ports[index])

    def start_process(self, index: int, spec: HostSpec) -> None:
        """The first process of a host that is no container."""
        folder = self.folder / f"h{index}"
        (folder / "home").mkdir(mode=0o700)
        order = {
            "spec": spec.__dict__,
            "call": str(folder / keeper.CALL),
            "home": str(folder / "home"),
            "port": self.ports[index],
            "alone": False,
        }
        assert self.python is not None
        subprocess.Popen(
            [self.python, "-m", f"{__package__}.lodger", json.dumps(order)],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "RDMALAB_HERE": str(folder / "here.json")},
        )

    def introduce(self) -> list[dict[str, Any]]:
        """Give every host its identity and keys; what a controller must know of them."""
        peers = {spec.name: spec.ip for spec in self.specs}
        for link in self.links:
            link.wait("parked", PARK_S)
            link.introduce(self.lab, peers, link.spec.mac)
        for link in self.links:
            link.wait("ready", READY_S)
        return [self.facts(link) for link in self.links]

    def facts(self, link: HostLink) -> dict[str, Any]:
        """What a controller must know of one host."""
        spec = link.spec
        ports = {name: number for number, name in enumerate(link.listeners, start=1)}
        way = {"transport": "ipc", "ip": str(self.folder / str(link.index)), "ports": ports}
        row = network.find_gid(spec.device, spec.ip, port=link.port)
        kernel = {**link.secrets(), **way}
        return {**link.facts(), "gid_index": row, "mac": spec.mac, "kernel": kernel}

    # --- the conversation -------------------------------------------------------------------

    def tell(self, event: str, **facts: Any) -> None:
        """One line to the controller."""
        self.controller.sendall(json.dumps({"event": event, **facts}).encode() + b"\n")

    def start(self) -> tuple[bytes, bytes]:
        """Everything up to ``ready``; the keys of the control service."""
        hosts = [f"h{index}" for index in range(len(self.specs))]
        nets = [] if self.python else [SWITCH, *(f"n{index}" for index in range(len(hosts)))]
        for place in (*nets, *hosts):
            self.expect(place)
        self.tell("listening")
        if nets:
            self.tell("wired", devices=self.wire())
        self.links = [self.lodge(index, spec) for index, spec in enumerate(self.specs)]
        keys = zmq.curve_keypair()
        control = {"transport": "ipc", "ip": str(self.folder / "c"), "port": 1}
        control["curve"] = keys[0].decode()
        self.tell("ready", hosts=self.introduce(), control=control)
        return keys

    def serve(self, keys: tuple[bytes, bytes]) -> None:
        """The control service, until somebody ends this process."""
        links = {link.spec.name: link for link in self.links}
        server = Control(links, [Door(keys, listener=listen_at(self.folder / "c-1"))])
        server.kept = self.kept
        server.netdevs = (
            {} if self.kept else {name: link_netdev(link) for name, link in links.items()}
        )
        server.serve()


def link_netdev(link: HostLink) -> str:
    """The interface below a host's device."""
    row = network.find_gid(link.spec.device, link.spec.ip, port=link.port)
    return netdev_of(link.spec.device, link.port, row)


def main() -> int:
    """The steward's whole life; the one argument is its end of the conversation, a descriptor."""
    controller = socket.socket(fileno=int(sys.argv[1]))
    controller.set_inheritable(False)
    lines = controller.makefile("rb")
    signal.alarm(START_S)  # ends this process
    steward = Steward(json.loads(lines.readline()), controller)
    try:
        keys = steward.start()
    except HostFailed as failed:
        say(str(failed))
        steward.tell("failed", detail=f"{failed.host} cannot be: {failed.last_word}")
        return 1
    except (RuntimeError, TimeoutError) as error:  # a command's, a host's, a container's fault
        steward.tell("failed", detail=str(error))
        return 1
    except Exception as error:
        traceback.print_exc(file=sys.__stderr__)
        steward.tell("failed", detail=f"{type(error).__name__}: {error}")
        return 1
    if json.loads(lines.readline() or b"{}").get("op") != "commit":
        say("the controller went away before the start was complete")
        return 1
    signal.alarm(0)
    steward.serve(keys)
    return 0


if __name__ == "__main__":
    sys.exit(main())
