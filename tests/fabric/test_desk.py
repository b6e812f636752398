"""The desk: a notebook's own kernel inside the guest. It is as beside JupyterLab, and it is a cell.

What a notebook can do there, and what nobody can: become root, leave the guest, command it.
"""

from __future__ import annotations

import re
import socket
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import rdmalab
from rdmalab import lab as labs
from rdmalab import state
from rdmalab.errors import BackendError, HostDied, RemoteError, UsageError

pytestmark = [pytest.mark.fabric, pytest.mark.timeout(600)]

# The control service, as somebody at the desk may try to speak with it: the reply, or None.
KNOCK = """
import itertools, json, os, zmq
door = json.load(open(os.path.expanduser("~/.rdmalab/labs/default/state.json")))["control"]
numbers = itertools.count(1000)
def ask(*frames, port=door["port"], seconds=5, **request):
    context = zmq.Context()
    sock = context.socket(zmq.DEALER)
    sock.curve_publickey, sock.curve_secretkey = zmq.curve_keypair()
    sock.curve_serverkey, sock.linger = door["curve"].encode(), 0
    sock.connect(f"tcp://{door['ip']}:{port}")
    try:
        sock.send_multipart(frames or [json.dumps({"id": next(numbers), **request}).encode()])
        return json.loads(sock.recv_multipart()[0]) if sock.poll(seconds * 1000) else None
    finally:
        context.destroy()
"""


@pytest.fixture(scope="module")
def room() -> Iterator[rdmalab.Lab]:
    """alice, bob and a desk, for all tests of this file; each leaves them usable."""
    yield rdmalab.up(("alice", "bob"), lab="desk", desk=True)
    labs.down("desk")


@pytest.fixture
def lab(room: rdmalab.Lab) -> rdmalab.Lab:
    """The same with a fresh kernel at the desk."""
    room.desk.restart()
    return room


def said(lab: rdmalab.Lab, code: str, timeout_s: float = 120) -> str:
    """Run a cell at the desk; what it printed."""
    told: list[dict[str, Any]] = []
    lab.desk.kernel.run(textwrap.dedent(code), timeout_s=timeout_s, on_output=told.append)
    texts = [message["content"] for message in told if message["msg_type"] == "stream"]
    assert all(text["name"] == "stdout" for text in texts), texts
    return "".join(text["text"] for text in texts)


def shell(lab: rdmalab.Lab, script: str) -> tuple[int, str]:
    """A shell line at the desk as the notebook's user: exit code, output and errors."""
    lab.desk.put(script=script)
    lab.desk.kernel.run(
        "import subprocess\n"
        "_done = subprocess.run(script, shell=True, capture_output=True, text=True, timeout=300)\n"
        "_ended = [_done.returncode, _done.stdout + _done.stderr]",
        timeout_s=300,
    )
    code, text = lab.desk.get("_ended")
    return code, text


# ---------------------------------------------------------------- as in a notebook


def test_a_notebooks_first_cells(lab: rdmalab.Lab) -> None:
    """What every lab begins with, and what it does then."""
    start = "%load_ext rdmalab\nimport rdmalab\nlab = rdmalab.up()\n%hosts"
    assert "(desk" not in said(lab, start)
    assert said(lab, "print(lab)").startswith("<Lab 'default' (desk, ")
    assert said(lab, "%%on alice\nimport os\nx = 6 * 7\nprint(os.uname().nodename)") == "alice\n"
    assert lab.alice.get("x") == 42, "the desk's alice is our alice"
    assert said(lab, "lab.bob.put(y=b'data'); print(lab.bob.get('y'))") == "b'data'\n"
    both = said(lab, "%%on alice bob\nprint(os.uname().nodename if 'os' in dir() else 'no os')")
    assert re.findall(r"── (\w+) ─", both) == ["alice", "bob"] and "alice\n" in both
    assert said(lab, "%%on bob --bg\nprint('beside')") == ""
    assert "beside" in said(lab, "%wait bob")
    with pytest.raises(RemoteError, match="alice.*ZeroDivisionError"):
        said(lab, "%%on alice\n1 / 0")


def test_the_package_there_is_the_one_beside_a_notebook(lab: rdmalab.Lab) -> None:
    from rdmalab.hostside import qpstate

    look = "import rdmalab\nimport rdmalab.hostside.qpstate as q\n"
    look += "print(rdmalab.__version__, len(q.STATES))"
    assert said(lab, look) == f"{rdmalab.__version__} {len(qpstate.STATES)}\n"
    assert said(lab, "print(sorted(set(rdmalab.__all__) - set(dir(rdmalab))))") == "[]\n"
    with pytest.raises(RemoteError, match="ModuleNotFoundError"):  # it needs %%on
        said(lab, "import pyverbs.device")
    code, text = shell(lab, "python3 -c 'import rdmalab; print(rdmalab.up().hosts)'")
    assert code == 0 and "<Host alice: 10.0.0.1" in text, text


def test_pictures_are_shown(lab: rdmalab.Lab) -> None:
    told: list[dict[str, Any]] = []
    for code in (
        "import matplotlib.pyplot as plt; plt.plot([1, 2]); plt.show()",
        "from rdmalab import view; view.bars({'one': 1, 'two': 2}, unit='s', title='Two')",
        "%load_ext rdmalab\nimport rdmalab; view.qp_diagram(rdmalab.up().alice, 'nothing')",
    ):
        lab.desk.kernel.run(code, timeout_s=120, on_output=told.append)
    shown = [message["content"]["data"] for message in told if "data" in message["content"]]
    assert any("image/png" in data for data in shown)
    assert sum("<svg" in data.get("text/html", "") for data in shown) == 2
    assert not [message for message in told if message["msg_type"] == "stream"]


def test_faults_and_captures(lab: rdmalab.Lab, guest: Callable) -> None:
    """They are done with the guest's rights, and asked for without these."""
    said(
        lab,
        "import rdmalab; lab = rdmalab.up()\n"
        "fault = lab.fault('bob', loss='30%'); _ = fault.__enter__()",
    )
    assert "loss 30%" in guest(lab, "tc qdisc show dev v-bob").out
    said(lab, "fault.__exit__()")
    assert "netem" not in guest(lab, "tc qdisc show dev v-bob").out
    sent = "import socket; socket.socket(2, 2).sendto(bytes(40), ('10.0.0.2', 4791))"
    found = said(
        lab,
        f"""
        with lab.capture("bob") as wire:
            lab.alice.run("{sent}")
        print(len(wire.packets), wire.figures.captured, wire.commands[0][:30])
        """,
    )
    assert found == "1 1 ip netns exec bob tcpdump -i e\n"


def test_stopping_the_desk_stops_what_it_waits_for(lab: rdmalab.Lab, sh: Callable) -> None:
    """An interrupt from outside reaches the cell that waits for a host, and then the host."""
    said(lab, "%load_ext rdmalab\nimport rdmalab; lab = rdmalab.up()")
    wait = "%%on alice\nimport time; open('/tmp/began', 'w').close(); time.sleep(300)"
    job = lab.desk.start(wait, timeout_s=300)
    while sh(lab, "alice", "rm /tmp/began").code:
        assert not job.done
    lab.desk.interrupt()
    with pytest.raises(RemoteError, match="KeyboardInterrupt"):
        job.result(60)
    lab.alice.run("print('idle again')", timeout_s=30)


def test_the_hosts_can_neither_be_exchanged_nor_stopped_from_there(lab: rdmalab.Lab) -> None:
    said(lab, "import rdmalab; lab = rdmalab.up(('alice', 'bob'))")
    for call, word in (
        ("rdmalab.up(('carol',))", "runs already, with the hosts alice, bob"),
        ("rdmalab.up(lab='mine')", "cannot be started here"),
        ("rdmalab.up(lab='mine', backend='vm')", "cannot be started here"),
        ("lab.down()", "cannot be stopped from here"),
    ):
        with pytest.raises(RemoteError, match=f"BackendError.*{word}"):
            said(lab, call)
    assert said(lab, "print(rdmalab.up() is lab)\nlab.alice.run('print(5)')") == "True\n5\n"


def test_nobody_answers_a_question(lab: rdmalab.Lab) -> None:
    for call in ("input('name? ')", "__import__('getpass').getpass()", "exit()"):
        with pytest.raises(RemoteError, match="desk"):
            said(lab, call)


def test_a_lab_has_a_desk_if_that_was_asked_for(shared_lab: rdmalab.Lab) -> None:
    with pytest.raises(UsageError, match="no desk"):
        _ = shared_lab.desk
    with pytest.raises(BackendError, match="without a desk"):
        rdmalab.up(lab="shared", desk=True)


# ---------------------------------------------------------------- nothing ends it


def test_a_kernel_that_dies_is_back(lab: rdmalab.Lab) -> None:
    """Also when it has thrown away what it knew about its lab, and the others do not notice."""
    lab.alice.run("kept = 1")
    with pytest.raises(HostDied, match="exit code 3"):
        said(lab, "import os, shutil; shutil.rmtree(os.path.expanduser('~/.rdmalab')); os._exit(3)")
    with pytest.raises(HostDied, match="SIGSEGV"):
        said(lab, "import ctypes; ctypes.string_at(0)")
    again = "%load_ext rdmalab\nimport rdmalab; print(rdmalab.up().alice.get('kept'))"
    assert said(lab, again) == "1\n"


@pytest.mark.long
def test_memory_and_processes_are_bounded(lab: rdmalab.Lab) -> None:
    with pytest.raises((HostDied, RemoteError), match="ran out of memory|MemoryError"):
        said(lab, "hoard = []\nwhile True:\n    hoard.append(bytearray(10 << 20))")
    with pytest.raises((HostDied, RemoteError), match="memory|MemoryError"):
        said(lab, "hoard = b'x' * (10 << 30)")
    with pytest.raises((HostDied, RemoteError)):
        said(
            lab,
            """
            import os, time
            while True:
                if os.fork() == 0:
                    while True:
                        try:
                            os.fork()
                        except OSError:
                            time.sleep(1)
            """,
        )
    lab.desk.restart()
    code, text = shell(lab, "ps ax | wc -l; dd if=/dev/zero of=$HOME/full bs=1M; rm $HOME/full")
    assert int(text.split()[0]) < 12 and "No space left" in text
    lab.alice.run("print('untouched')")


# ---------------------------------------------------------------- a cell without a door


def test_no_rights(lab: rdmalab.Lab) -> None:
    """No capability, none to be had; the guest's network is looked at and not touched."""
    status = said(lab, "print(open('/proc/self/status').read())")
    assert re.findall(r"Cap\w+:\s+(\S+)", status) == ["0" * 16] * 5
    assert re.search(r"NoNewPrivs:\s+1", status) and re.search(r"Uid:(\s+1000){4}", status)
    for forbidden in (
        "ip addr add 10.0.0.9/24 dev br0",
        "ip link set v-bob down",
        "ip netns exec alice true",
        "tc qdisc add dev v-bob root netem loss 100%",
        "rdma link delete rxe_alice",
        "tcpdump -c 1 -i eth0",
        "mount -t tmpfs tmpfs /tmp",
        "umount /opt/rdmalab",
        "nsenter -t 1 -m true",
        "hostname mallory",
        "echo 1 > /proc/sys/net/ipv4/ip_forward",
        "mknod /tmp/node c 1 3",
        "insmod /dev/null",
        "kill -9 1",
        "su -c true",
        "cat /proc/1/environ /proc/1/maps",
        "ls /proc/1/fd/ /proc/1/root/",
    ):
        code, text = shell(lab, forbidden)
        assert code, (forbidden, text)


def test_a_machine_of_its_own(lab: rdmalab.Lab, sh: Callable, guest: Callable) -> None:
    """Its namespaces are no host's and, but for the network, not the guest's."""
    script = "hostname; for ns in cgroup ipc mnt pid uts net; do readlink /proc/self/ns/$ns; done"
    seen = [shell(lab, script)[1].split(), sh(lab, "alice", script).out.split()]
    seen.append(guest(lab, script).out.split())
    assert [names[0] for names in seen[:2]] == ["desk", "alice"]
    for desk, host, around in list(zip(*seen, strict=True))[1:-1]:
        assert len({desk, host, around}) == 3
    lab.bob.run("import subprocess; sleeper = subprocess.Popen(['sleep', '4321'])")
    assert "sleep 4321" in guest(lab, "ps axww -o args").out
    assert "sleep 4321" not in shell(lab, "ps axww -o args | grep -v grep")[1]
    lab.bob.run("sleeper.kill(); sleeper.wait()")


def test_no_device_and_no_file_of_the_hosts_side(
    lab: rdmalab.Lab, sh: Callable, guest: Callable
) -> None:
    assert shell(lab, "ls /dev/infiniband /sys/fs/cgroup") == (
        0,
        "/dev/infiniband:\n\n/sys/fs/cgroup:\n",
    )
    assert "No IB devices" in shell(lab, "ibv_devinfo")[1]
    assert "ermission denied" in shell(lab, "ls /opt/rdmalab")[1]
    assert "ermission denied" in sh(lab, "alice", "ls /opt/desk").err
    assert "rdmalab" in guest(lab, "ls /opt/rdmalab /opt/desk").out
    assert (
        "hidden" not in shell(lab, "ls -R /opt/desk")[1]
        and "grading" not in shell(lab, "ls /opt/desk/rdmalab")[1]
    )
    secrets = [lab.state.control["curve"], lab.state.desk["kernel"]["curve"]]  # type: ignore[index]
    code, text = shell(lab, "cat ~/.rdmalab/labs/default/state.json; env; cat /run/* 2>&1")
    assert lab.state.hosts[0]["kernel"]["key"] in text, "the hosts' keys are the desk's as well"
    assert not [key for key in secrets if key in text], "the owner's is not"


def test_no_way_out_of_the_guest(lab: rdmalab.Lab) -> None:
    """Not to this machine's loopback, not to its network, not to a name; not even to the wire."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        reached = said(
            lab,
            f"""
            import socket
            places = [(place, {port}) for place in ("10.0.2.2", "127.0.0.1", "fec0::2")]
            places += [("10.0.2.3", 53), ("1.1.1.1", 80), ("10.0.0.1", 22), ("10.0.2.15", 22)]
            for place in places:
                try:
                    socket.create_connection(place, timeout=3).close()
                    print("reached", place)
                except OSError:
                    pass
            question = bytes.fromhex("000101000001000000000000036f7267000001 0001")
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
                asking.settimeout(3)
                try:
                    asking.sendto(question, ("10.0.2.3", 53))
                    print("answered", asking.recv(500))
                except OSError:
                    pass
            for family in (socket.AF_PACKET, socket.AF_VSOCK):
                try:
                    socket.socket(family, socket.SOCK_RAW).close()
                    print("opened", family)
                except OSError:
                    pass
            print("tried")
            """,
        )
        assert reached == "tried\n"
        server.settimeout(0.2)
        with pytest.raises(TimeoutError):
            server.accept()


def test_the_control_service_does_little_for_the_desk(lab: rdmalab.Lab, guest: Callable) -> None:
    """What is the owner's alone is refused in words; what is no request at all harms nobody."""
    said(lab, KNOCK)
    assert "'alice': 'ready'" in said(lab, "print(ask(op='hello')['hosts'])")
    for request in (
        "op='root', argv=['touch', '/run/owned']",
        "op='exec', host='alice', root=True, argv=['true']",
        "op='exec', host='alice', root=1, argv=['true']",
        "op='log'",
        "op='limit'",
        "op='restart', host='desk'",
        "op='interrupt', host='desk'",
        "op='exec', host='desk', argv=['true']",
        "op='exec', host='carol', argv=['true']",
        "op='exec', host='alice', argv=['x' * 100_000]",
        "op='errand', host='desk', argv=['fault', 'clear']",
        "op='errand', host='alice; touch /run/owned', argv=['fault', 'clear']",
        "op='errand', host='alice', argv=['fault', 'loss=5%; touch /run/owned']",
        "op='errand', host='alice', argv=['fault', 'loss=$(touch /run/owned)%']",
        "op='errand', host='alice', argv=['capture', '1', '64', '-w', '/run/owned']",
        "op='errand', host='alice', argv=['capture', '-w/run/owned', '64']",
        "op='errand', host='alice', argv=['touch', '/run/owned']",
        "op='errand', host='alice', argv='fault'",
        "op=['root'], argv=['touch', '/run/owned']",
    ):
        answer = said(lab, f"print(ask({request}))")
        assert "'error'" in answer, (request, answer)
    assert said(lab, "print(ask(port=7000, op='hello', seconds=3))") == "None\n"
    for junk in (
        "b'x'",
        "b'[]', b''",
        "b''",
        "b'{\"id\": {}}'",
        "b'\\xff' * 100",
        "bytes(4 << 20)",
    ):
        said(lab, f"ask({junk}, seconds=1)")
    assert "'alice': 'ready'" in said(lab, "print(ask(op='hello')['hosts'])")
    assert guest(lab, "ls /run/owned").code, "nothing of it was done"
    log = (state.lab_folder("desk") / "console.log").read_text()
    assert "request failed" not in log, "a log of it would be on the owner's disk"
    assert lab.remote.call("hello")["hosts"]["desk"] == "ready"


def test_the_desks_commands_are_bounded(lab: rdmalab.Lab) -> None:
    """Else each would cost the guest descriptors and memory that are not the desk's."""
    said(
        lab,
        KNOCK + "import rdmalab\nfrom contextlib import ExitStack\nremote = rdmalab.up().remote",
    )
    crowd = """
    with ExitStack() as stack:
        running = [
            stack.enter_context(remote.start("exec", ["sleep", "60"], host="alice"))
            for _ in range(17)
        ]
        print(ask(op="exec", host="bob", argv=["true"]))
    """
    with pytest.raises(RemoteError, match="refused"):
        said(lab, crowd + "    running[-1].read(20)")
    assert said(lab, "print(remote.run('exec', ['echo', 'again'], host='bob'))") == "again\n\n"
