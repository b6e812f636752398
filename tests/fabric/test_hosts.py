"""Each host is a machine of its own: names, processes, addresses, devices, rights, memory.

The witnesses are the tools of iproute2, procps and rdma-core on the hosts, and the guest around
them, which sees all hosts at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

import rdmalab

pytestmark = [pytest.mark.fabric, pytest.mark.timeout(300)]

FOUR = ("alice", "bob", "carol", "dave")
EIGHT = (*FOUR, "erin", "frank", "grace", "heidi")
USED_UP_MIB = 850  # by two hosts that have tried everything; the README says so too
TWO_HOSTS_MIB = 700  # what a lab may take of this machine's memory; the README says so too
EIGHT_HOSTS_MIB = 1000


def value(host: rdmalab.Host, expression: str) -> Any:
    """What an expression is on a host."""
    host.run(f"_answer = {expression}")
    return host.get("_answer")


def resident_mib(pid: int) -> float:
    """Memory that a process holds now, in MiB."""
    with open(f"/proc/{pid}/status") as status:
        return int(re.search(r"VmRSS:\s+(\d+) kB", status.read())[1]) / 1024  # type: ignore[index]


def ping_pong(
    lab: rdmalab.Lab,
    sh: Callable,
    server: str,
    client: str,
    row: int,
    other_row: int,
    mtu: int = 1024,
) -> str:
    """rdma-core's own RC ping-pong between two hosts; what the client says."""
    ping = f"ibv_rc_pingpong -m {mtu} -n 20"
    job = lab[server].start(
        f"import subprocess; p = subprocess.run('{ping} -d rxe_{server} -g {row}', "
        "shell=True, timeout=60, check=True, capture_output=True)"
    )
    listens = (
        "for i in $(seq 200); do ss -Hltn | grep -q :18515 && exit 0; sleep 0.05; done; exit 1"
    )
    assert sh(lab, server, listens).code == 0
    done = sh(lab, client, f"{ping} -d rxe_{client} -g {other_row} {lab[server].ip}")
    job.result(90)
    assert done.code == 0, done
    return done.out


# ---------------------------------------------------------------- a machine of its own


def test_namespaces_are_its_own(shared_lab: rdmalab.Lab, sh: Callable, guest: Callable) -> None:
    """Six namespaces of each host differ from the other's and from the guest's."""
    script = "hostname; for ns in cgroup ipc mnt net pid uts; do readlink /proc/self/ns/$ns; done"
    seen = {name: sh(shared_lab, name, script).out.split() for name in ("alice", "bob")}
    around = guest(shared_lab, script).out.split()
    assert seen["alice"][0] == "alice" and seen["bob"][0] == "bob"
    for inner, outer, other in zip(seen["alice"][1:], around[1:], seen["bob"][1:], strict=True):
        assert len({inner, outer, other}) == 3, f"shared: {inner}"


def test_ps_shows_its_own_processes_only(
    shared_lab: rdmalab.Lab, sh: Callable, guest: Callable
) -> None:
    shared_lab.bob.run("import subprocess; sleeper = subprocess.Popen(['sleep', '4321'])")
    assert "sleep 4321" in sh(shared_lab, "bob", "ps axww -o args").out
    assert "sleep 4321" in guest(shared_lab, "ps axww -o args").out
    assert "sleep 4321" not in sh(shared_lab, "alice", "ps axww -o args").out
    pids = sh(shared_lab, "alice", "ls /proc | grep '^[0-9]'; ls -d /proc/1").out.split()
    assert "/proc/1" in pids and len(pids) < 10
    shared_lab.bob.run("sleeper.kill(); sleeper.wait()")


def test_messages_memory_and_files_of_one_host_are_unknown_to_the_other(
    shared_lab: rdmalab.Lab, sh: Callable
) -> None:
    """System V IPC, POSIX shared memory, abstract sockets, /tmp and the home folder."""
    shared_lab.alice.run("""
import os, socket
from multiprocessing import shared_memory
shm = shared_memory.SharedMemory("canary", create=True, size=4096)
sock = socket.socket(socket.AF_UNIX); sock.bind("\\0canary"); sock.listen()
for folder in ("/tmp", "/var/tmp", os.path.expanduser("~")):
    open(f"{folder}/canary", "w").close()
os.system("ipcmk -Q > /dev/null")
""")
    look = "ipcs -q; ls /dev/shm /tmp /var/tmp ~; ss -xla"
    mine, others = sh(shared_lab, "alice", look).out, sh(shared_lab, "bob", look).out
    assert mine.count("canary") == 5 and "learner" in mine
    assert "canary" not in others and "0x" not in others
    shared_lab.alice.run("sock.close(); shm.close(); shm.unlink(); os.system('ipcrm -a')")


def test_learners_code_has_no_rights(shared_lab: rdmalab.Lab, sh: Callable) -> None:
    """No capability, none to be had, and no way to change what the administrator set."""
    status = value(shared_lab.alice, "open('/proc/self/status').read()")
    assert re.findall(r"Cap\w+:\s+(\S+)", status) == ["0" * 16] * 5
    assert re.search(r"NoNewPrivs:\s+1", status) and re.search(r"Uid:(\s+1000){4}", status)
    for forbidden in (
        "ip addr add 10.0.0.9/24 dev eth0",
        "ip link set eth0 down",
        "tc qdisc add dev eth0 root netem loss 100%",
        "rdma link delete rxe_alice",
        "rdma link delete rxe_bob",
        "mount -t tmpfs tmpfs /tmp",
        "hostname mallory",
        "nft add table ip x",
        "echo 1 > /proc/sys/net/ipv4/ip_forward",
        "mknod /tmp/node c 1 3",
        "kill -9 1",
        "su -c true",
    ):
        assert sh(shared_lab, "alice", forbidden).code, forbidden
    assert sh(shared_lab, "alice", "hostname").out == "alice\n"


def test_proc_shows_nothing_of_the_hosts_administrator(
    shared_lab: rdmalab.Lab, sh: Callable
) -> None:
    """Process 1 holds the kernel's keys, so its memory and files are closed to learners."""
    for path in ("environ", "maps", "mem", "root/", "fd/", "cwd/", "exe", "stack"):
        done = sh(shared_lab, "alice", f"ls /proc/1/{path}* && cat /proc/1/{path}")
        assert done.code and "ermission" in done.err, path
    assert sh(shared_lab, "alice", "strace -p 1").code
    assert "No such" in sh(shared_lab, "alice", "ls /sys/fs/cgroup/alice").err


# ---------------------------------------------------------------- devices


def test_a_host_finds_and_opens_its_own_device_only(
    shared_lab: rdmalab.Lab, sh: Callable, guest: Callable
) -> None:
    """sysfs, the device nodes, libibverbs and pyverbs agree: one device, its own (B01, B03)."""
    for host, other in ((shared_lab.alice, shared_lab.bob), (shared_lab.bob, shared_lab.alice)):
        shown = sh(shared_lab, host.name, "ibv_devices; ls /dev/infiniband").out
        assert host.device in shown and other.device not in shown
        assert len(re.findall(r"uverbs\d+", shown)) == 1
        assert sh(shared_lab, host.name, f"ibv_devinfo -d {other.device}").code
        host.run(f"""
import os
from pyverbs.device import Context, get_device_list
from pyverbs.pyverbs_error import PyverbsError
names = [device.name.decode() for device in get_device_list()]
ctx = Context(name={host.device!r})
try:
    Context(name={other.device!r})
    refused = False
except PyverbsError:
    refused = True
try:
    os.mknod("/tmp/uverbs", 0o020666, os.makedev(231, 192))
    refused = False
except PermissionError:
    pass
ctx.close()
""")
        assert host.get("names") == [host.device] and host.get("refused")


def test_the_rdma_cgroup_refuses_the_others_device_even_with_its_node(
    shared_lab: rdmalab.Lab, sh: Callable, guest: Callable
) -> None:
    """The second bolt: the guest shows alice bob's device, node and all; she still may not open it.

    That it is the cgroup that refuses is seen by lifting its limit.
    """
    cgroup = "/sys/fs/cgroup/alice/user"
    pid = guest(shared_lab, f"head -n 1 {cgroup}/kernel/cgroup.procs").out.strip()
    inside = f"nsenter -t {pid} -m"
    bob = "/sys/class/infiniband_verbs/uverbs1"
    assert guest(shared_lab, f"cat {bob}/ibdev").out == "rxe_bob\n"
    major, minor = guest(shared_lab, f"cat {bob}/dev").out.strip().split(":")
    sysfs = "/sys/devices/virtual/infiniband/rxe_bob"
    guest(shared_lab, f"{inside} mknod -m 666 /dev/infiniband/uverbs1 c {major} {minor}")
    guest(shared_lab, f"{inside} umount {sysfs}")
    try:
        refused = sh(shared_lab, "alice", "ibv_devices; ibv_devinfo -d rxe_bob")
        guest(shared_lab, f"echo rxe_bob hca_handle=max hca_object=max > {cgroup}/rdma.max")
        opened = sh(shared_lab, "alice", "ibv_devinfo -d rxe_bob")
    finally:
        guest(shared_lab, f"echo rxe_bob hca_handle=0 hca_object=0 > {cgroup}/rdma.max")
        guest(shared_lab, f"{inside} rm /dev/infiniband/uverbs1")
        guest(shared_lab, f"{inside} mount -t tmpfs -o ro,mode=000 tmpfs {sysfs}")
    assert "rxe_bob" in refused.out and refused.code and "Failed to open" in refused.err
    assert opened.code == 0 and "PORT_ACTIVE" in opened.out
    assert sh(shared_lab, "alice", "ibv_devinfo -d rxe_bob").code


def test_every_hosts_device_is_active_and_listens(shared_lab: rdmalab.Lab, sh: Callable) -> None:
    """B01: the rxe device made in a namespace is ACTIVE there, on eth0, and has its UDP port."""
    for host in shared_lab.hosts:
        links = json.loads(sh(shared_lab, host.name, "rdma -j link").out)
        mine = [link for link in links if link.get("netdev") == "eth0"]
        assert [link["ifname"] for link in mine] == [host.device]
        assert mine[0]["state"] == "ACTIVE" and mine[0]["physical_state"] == "LINK_UP"
        sockets = sh(shared_lab, host.name, "ss -Hlnu").out
        assert re.search(r"0\.0\.0\.0:4791\s", sockets), sockets


SHIFT = """
ip addr del 10.0.0.1/24 dev eth0
ip addr add fd00::1/64 dev eth0 nodad
ip addr add fd00::2/64 dev eth0 nodad
ip addr add 10.0.0.1/24 dev eth0
"""
SHIFT_BACK = """
ip addr del fd00::1/64 dev eth0
ip addr del fd00::2/64 dev eth0
ip addr del 10.0.0.1/24 dev eth0
ip addr add 10.0.0.1/24 dev eth0
"""
# The kernel fills the table a moment after the addresses have been set.
FOLLOW = """
import time
import rdmalab
def follow(good):
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            if good(rdmalab.here.gid_index):
                break
        except LookupError:
            pass
        time.sleep(0.01)
    return rdmalab.here.gid_index
"""


def test_the_gid_is_chosen_by_value_when_rows_shift(shared_lab: rdmalab.Lab, sh: Callable) -> None:
    """B10: IPv6 addresses come first, the IPv4 address goes and comes back; the GID stays right."""
    alice, before = shared_lab.alice, shared_lab.alice.gid_index
    alice.run("from rdmalab import here as early")
    assert value(alice, "early.gid_index") == before
    done = sh(shared_lab, "alice", SHIFT, root=True)
    assert done.code == 0, done.err
    try:
        alice.run(FOLLOW)
        row = value(alice, f"follow(lambda row: row != {before})")
        assert row != before, "the rows did not shift, so this shows nothing"
        assert value(alice, "early.gid_index") == row
        table = "cat /sys/class/infiniband/rxe_alice/ports/1/gids/"
        assert sh(shared_lab, "alice", f"{table}{row}").out.strip().endswith("ffff:0a00:0001")
        alice.restart()
        assert value(alice, "__import__('rdmalab').here.gid_index") == row
        alice.run("from pyverbs.device import Context; c = Context(name='rxe_alice')")
        gid = value(alice, f"c.query_gid(1, {row}).gid")
        assert gid == "0000:0000:0000:0000:0000:ffff:0a00:0001"
        ping_pong(shared_lab, sh, "alice", "alice", row, row)
    finally:
        sh(shared_lab, "alice", SHIFT_BACK, root=True)
    alice.run(FOLLOW)
    assert value(alice, f"follow(lambda row: row == {before})") == before


def test_no_address_no_gid_and_it_says_so(shared_lab: rdmalab.Lab, sh: Callable) -> None:
    """B10: without its IPv4 address a host has no such GID; the error names both and the cure."""
    sh(shared_lab, "alice", "ip addr del 10.0.0.1/24 dev eth0", root=True)
    try:
        with pytest.raises(rdmalab.RemoteError) as caught:
            shared_lab.alice.run(
                """
import time
from rdmalab import here
while True:
    here.gid_index
    time.sleep(0.01)
""",
                timeout_s=20,
            )
        assert caught.value.ename == "LookupError"
        assert "::ffff:10.0.0.1" in str(caught.value) and "ip addr add" in str(caught.value)
    finally:
        sh(shared_lab, "alice", "ip addr add 10.0.0.1/24 dev eth0", root=True)


@pytest.mark.parametrize("mtu", [1024, 4096])
def test_the_wire_carries_both_path_mtus(shared_lab: rdmalab.Lab, sh: Callable, mtu: int) -> None:
    """Whole frames of at least 1500 bytes pass unfragmented, and rdma-core's ping-pong agrees."""
    lab = shared_lab
    for host in lab.hosts:
        assert int(sh(lab, host.name, "cat /sys/class/net/eth0/mtu").out) >= 1500
        assert "active_mtu:\t\t4096" in sh(lab, host.name, f"ibv_devinfo -d {host.device}").out
        assert host.mtu == 4096
    assert sh(lab, "alice", f"ping -M do -c 1 -W 5 -s {mtu + 60} 10.0.0.2").code == 0
    out = ping_pong(lab, sh, "bob", "alice", lab.bob.gid_index, lab.alice.gid_index, mtu)
    assert "20 iters" in out


# ---------------------------------------------------------------- no way out


REACH = """
import socket
def reach(address, port):
    try:
        socket.create_connection((address, port), timeout=20).close()
        return "connected"
    except TimeoutError:
        return "hangs"
    except OSError as error:
        return f"refused: {error}"
"""


TURN_ROUND = """
import ctypes, os, signal, socket, stat, time
libc = ctypes.CDLL(None)
targets = (("10.0.2.2", 22), ("10.0.2.2", 8888), ("10.0.2.3", 53), ("8.8.8.8", 53))

def guests_sockets():
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                sock = socket.socket(fileno=os.dup(fd))
                listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if listens and sock.getsockname()[0] == "10.0.2.15":
                    yield sock
        except OSError:
            pass

def turn_round():
    reached, tries = [], 0
    for sock in list(guests_sockets()):
        for target in targets:
            libc.connect(sock.fileno(), bytes(16), 16)  # AF_UNSPEC: it listens no more
            sock.settimeout(20)
            tries += 1
            try:
                sock.connect(target)
                reached.append(target)
            except OSError:
                pass
        libc.connect(sock.fileno(), bytes(16), 16)
    with open("/tmp/said", "w") as file:
        file.write(f"{tries} tries, reached: {reached}")

kernel = os.getpid()
if os.fork() == 0:
    os.kill(kernel, signal.SIGSTOP)  # its sockets are ours as well: it would die of this at once
    try:
        turn_round()
    finally:
        os.kill(kernel, signal.SIGCONT)
        os._exit(0)
while True:
    time.sleep(1)
"""


def test_no_way_out(shared_lab: rdmalab.Lab) -> None:
    """Neither QEMU's own addresses, nor the guest's, nor the world beyond: refused at once."""
    alice = shared_lab.alice
    alice.run(REACH)
    for address in (
        "10.0.2.2",
        "10.0.2.3",
        "10.0.2.15",
        "8.8.8.8",
        "169.254.169.254",
        "2001:db8::1",
    ):
        assert value(alice, f"reach({address!r}, 80)").startswith("refused"), address


def test_the_agents_ports_cannot_be_reached_from_a_host(
    shared_lab: rdmalab.Lab, sh: Callable, guest: Callable
) -> None:
    """The guest listens for the controller only; alice reaches none of these, by no address."""
    ports = sorted(
        {int(p) for p in re.findall(r"10\.0\.2\.15:(\d+)", guest(shared_lab, "ss -Hltn").out)}
    )
    assert 7000 in ports and len(ports) == 11
    alice = shared_lab.alice
    alice.run(REACH)
    for address in ("10.0.2.15", "10.0.0.1", "10.0.0.2", "127.0.0.1"):
        answers = value(alice, f"[reach({address!r}, port) for port in {ports}]")
        assert all(answer.startswith("refused") for answer in answers), answers
    assert "LISTEN" not in sh(shared_lab, "bob", "ss -Hltn src 10.0.0.2").out


def test_not_even_over_a_socket_of_the_guests_own(shared_lab: rdmalab.Lab) -> None:
    """A host's kernel holds the guest's listening sockets; turned round they lead nowhere either.

    QEMU's user network refuses everything (restrict=on). The kernel dies of it, and the next one
    listens again.
    """
    with pytest.raises(rdmalab.HostDied, match="A fresh one is running"):
        shared_lab.alice.run(TURN_ROUND)
    said = value(shared_lab.alice, "open('/tmp/said').read()")
    tries, _, reached = said.partition(" tries, reached: ")
    assert int(tries) >= 20 and reached == "[]", said
    shared_lab.alice.restart()
    assert value(shared_lab.alice, "1 + 1") == 2


# ---------------------------------------------------------------- four, eight, two labs


def identities(lab: rdmalab.Lab, sh: Callable) -> dict[str, list[str]]:
    """Names, MACs, node GUIDs and GIDs of a lab's hosts, as the hosts see them."""
    seen: dict[str, list[str]] = {"device": [], "mac": [], "guid": [], "gid": []}
    for host in lab.hosts:
        out = sh(
            lab,
            host.name,
            "cat /sys/class/net/eth0/address; cd /sys/class/infiniband/rxe_*/ 2>&1;"
            f"cd /sys/class/infiniband/{host.device}; cat node_guid; basename $PWD;"
            "cat ports/1/gids/? | grep -v ^0000:0000:0000:0000:0000:0000:0000:0000",
        ).out
        lines = out.split("\n")[:-1]
        lines = [line for line in lines if "can't cd" not in line and "cd:" not in line]
        seen["mac"].append(lines[0])
        seen["guid"].append(lines[1])
        seen["device"].append(lines[2])
        seen["gid"] += lines[3:]
    return seen


@pytest.mark.long
def test_two_labs_of_four_hosts_share_no_identity(new_lab: Callable, sh: Callable) -> None:
    """B05: device names, MACs, node GUIDs and GIDs are unique in a lab, MACs across labs.

    Four hosts also work as such: each one's RDMA device reaches each other's.
    """
    labs = [new_lab(*FOUR), new_lab(*FOUR)]
    seen = [identities(lab, sh) for lab in labs]
    for one in seen:
        for kind, values in one.items():
            assert len(set(values)) == len(values) >= 4, (kind, values)
    assert len({*seen[0]["mac"], *seen[1]["mac"]}) == 8
    assert {host.ip for host in labs[0].hosts} == {f"10.0.0.{i}" for i in (1, 2, 3, 4)}
    for a, b in (("carol", "dave"), ("dave", "alice"), ("bob", "carol")):
        lab = labs[1]
        ping_pong(lab, sh, a, b, lab[a].gid_index, lab[b].gid_index)


def test_memory_of_two_hosts(new_lab: Callable) -> None:
    """A fresh lab of two fits what the README promises, with a kernel at work on each host."""
    lab = new_lab("alice", "bob")
    for host in lab.hosts:
        host.run("import numpy, pyverbs.qp; data = bytearray(16 << 20)")
    used = resident_mib(lab.state.pid)
    print(f"two hosts: {used:.0f} MiB")
    assert used <= TWO_HOSTS_MIB


def test_memory_of_two_hosts_that_other_tests_have_used_up(shared_lab: rdmalab.Lab) -> None:
    """The guest's own limits hold, whatever was tried on its hosts before."""
    used = resident_mib(shared_lab.state.pid)
    print(f"two hosts, used up: {used:.0f} MiB")
    assert used <= USED_UP_MIB


@pytest.mark.long
def test_eight_hosts_and_their_memory(new_lab: Callable, sh: Callable) -> None:
    """Eight hosts start, answer, and need no more memory than the README says."""
    lab = new_lab(*EIGHT)
    assert [host.ip for host in lab.hosts] == [f"10.0.0.{i}" for i in range(1, 9)]
    work = "import numpy, pyverbs.qp; data = bytearray(16 << 20)"
    work += "; from rdmalab import here; name = here.name"
    jobs = [host.start(work) for host in lab.hosts]
    for job in jobs:
        job.result(120)
    assert [host.get("name") for host in lab.hosts] == list(EIGHT)
    used = resident_mib(lab.state.pid)
    print(f"eight hosts: {used:.0f} MiB")
    assert used <= EIGHT_HOSTS_MIB


def test_a_ninth_host_is_refused_with_the_limit(new_lab: Callable) -> None:
    with pytest.raises(rdmalab.UsageError, match="1 to 8 hosts, not 9"):
        new_lab(*EIGHT, "ivan")
