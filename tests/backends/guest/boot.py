"""Process 1 of the test machine: mounts, network, dockerd, and a server that runs commands.

It stands where the guest image has the labs' own boot.py (see rdmalab/guest/initrd-init), in the
same root with a Docker engine added. No systemd: what a service manager would do is in this file.

The machine is saved and restored, so what belongs to one run comes and goes by orders on QEMU's
boot port: "join" brings the time, a token and folders lent over 9p, "leave" lets go of them.

A command is one TCP connection on port 7000, which QEMU forwards: a line of JSON comes in (token,
argv, cwd, env), frames go out (a letter, a length, bytes): "o" standard output, "e" standard error,
at last "x" with the exit code. Who hangs up ends his command.
"""

import hmac
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

sys.path.insert(0, "/opt/rdmalab")
from processors import start_all  # rdmalab/hostside/processors.py

ADDRESS, PREFIX, PORT = "192.168.76.15", 24, 7000
DOCKERD_S = 90.0
DOCKER_LOG = Path("/var/log/dockerd.log")
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "PYTHONPATH": "/checkout:/opt/site",
    "PYTHONPYCACHEPREFIX": "/var/cache/python",
    "JUPYTER_PATH": "/opt/site/share/jupyter",
    "RDMALAB_CACHE_DIR": "/var/cache/rdmalab",
    "RDMALAB_RUNTIME_DIR": "/run/rdmalab",
}
LENT = "mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=262144"
IMAGES = Path(ENVIRONMENT["RDMALAB_CACHE_DIR"], "images")
MODULES = ("loop", "rdma_rxe", "rdma_ucm", "ib_umad", "veth", "bridge", "br_netfilter")
run = {"token": ""}  # this run's


def say(text: str) -> None:
    """One line on the console, which the tests keep as a log."""
    print(f"test-machine {time.monotonic():7.2f}  {text}", file=sys.stderr, flush=True)


def sh(script: str) -> None:
    """Run a few lines of shell; the first that fails ends the machine."""
    subprocess.run(["sh", "-euc", script], check=True, stdin=subprocess.DEVNULL)


# ---------------------------------------------------------------- setting up


def set_up() -> None:
    """Mounts, names, network and kernel modules."""
    os.environ.clear()
    os.environ.update(ENVIRONMENT)
    sh("""
        mkdir -p /dev/pts /dev/shm /checkout /lent /opt/site
        mkdir -p /data /var/lib/docker /var/cache/rdmalab
        mount -t devpts -o ptmxmode=0666 devpts /dev/pts
        mount -t tmpfs -o mode=1777 tmpfs /dev/shm
        mount -t tmpfs -o mode=755 tmpfs /run
        ln -sf /proc/self/fd /dev/fd
        hostname testmachine
        echo "127.0.0.1 localhost testmachine" > /etc/hosts
        ln -sf python3 /usr/bin/python
        printf '#!/bin/sh\\nexec python3 -m rdmalab "$@"\\n' > /usr/bin/rdmalab
        chmod 755 /usr/bin/rdmalab
    """)
    sh(f"""
        modprobe -a virtio_net {" ".join(MODULES)}
        ip link set lo up
        ip address add {ADDRESS}/{PREFIX} dev eth0
        ip link set eth0 up
        mount -t erofs -o ro /dev/vdb /opt/site
        mkfs.ext4 -q -F -O ^has_journal /dev/vdc
        mount -t ext4 /dev/vdc /data
        mkdir /data/docker /data/cache
        mount --bind /data/docker /var/lib/docker
        mount --bind /data/cache /var/cache/rdmalab
    """)


def join(order: dict) -> None:
    """Take what is this run's: the time, randomness, the checkout, the guest image under its id."""
    time.clock_settime(time.CLOCK_REALTIME, order["time"])
    Path("/dev/urandom").write_text(order["seed"])
    sh(f"""
        mkdir -p {IMAGES}/{order["image"]}
        {LENT},cache=mmap checkout /checkout
        {LENT},cache=loose image /lent
        find /lent -type f ! -name verified.json -exec ln -s '{{}}' {IMAGES}/{order["image"]} ';'
    """)
    run["token"] = order["token"]


def leave() -> None:
    """Let go of it again, before the machine is saved."""
    run["token"] = ""
    sh(f"umount /checkout /lent; rm -r {IMAGES}; sync")


def start_docker() -> None:
    """Start dockerd and wait until it answers. Raises RuntimeError with the end of its log."""
    with open(DOCKER_LOG, "wb") as log:
        daemon = subprocess.Popen(
            ["dockerd", "--storage-driver=overlay2"], stdout=log, stderr=log, start_new_session=True
        )
    end = time.monotonic() + DOCKERD_S
    while True:
        with socket.socket(socket.AF_UNIX) as sock:
            try:
                sock.connect("/run/docker.sock")
                sock.sendall(b"GET /_ping HTTP/1.0\r\n\r\n")
                sock.settimeout(5)
                if b"200 OK" in sock.recv(4096):
                    return
            except OSError:
                pass
        if daemon.poll() is not None or time.monotonic() > end:
            tail = DOCKER_LOG.read_text(errors="replace").splitlines()[-6:]
            raise RuntimeError("dockerd does not answer: " + " | ".join(tail))
        time.sleep(0.1)


def obey(port: IO[bytes]) -> None:
    """Orders of who started QEMU, each answered, until he hangs up."""
    for line in iter(port.readline, b""):
        order = json.loads(line)
        if order["op"] == "join":
            join(order)
            tell(port, {"event": "ready"})
        else:
            leave()
            tell(port, {"event": "left"})


def tell(port: IO[bytes], event: dict[str, str]) -> None:
    """A line for who started QEMU."""
    port.write(json.dumps(event).encode() + b"\n")


def open_port() -> IO[bytes]:
    """The serial port that has the boot port's name; no udev is here to make a link of it."""
    for name in Path("/sys/class/virtio-ports").glob("*/name"):
        if name.read_text().strip() == "org.rdmalab.boot":
            return open(f"/dev/{name.parent.name}", "r+b", buffering=0)
    raise RuntimeError("QEMU has no boot port")


# ---------------------------------------------------------------- running commands


def serve(server: socket.socket) -> None:
    """Each connection is a command, in a thread of its own."""
    while True:
        sock, _ = server.accept()
        threading.Thread(target=answer, args=(sock,), daemon=True).start()


def answer(sock: socket.socket) -> None:
    """Read one order, run it, send what it prints and how it ended."""
    with sock:
        sock.settimeout(30)
        try:
            order = json.loads(sock.makefile("rb").readline())
            if run["token"] and hmac.compare_digest(str(order["token"]), run["token"]):
                sock.settimeout(None)
                execute(sock, order)
        except (OSError, ValueError, KeyError) as error:
            say(f"an order was not carried out: {error!r}")


def execute(sock: socket.socket, order: dict[str, object]) -> None:
    """Run a command in a session of its own, which ends when it has ended or nobody listens."""
    try:
        child = subprocess.Popen(
            order["argv"],
            cwd=order["cwd"],
            env={**ENVIRONMENT, **order["env"]},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        send(sock, b"e", f"{order['argv'][0]}: {error.strerror}\n".encode())
        send(sock, b"x", b"127")
        return
    try:
        pump(sock, child)
        send(sock, b"x", str(child.returncode).encode())
    except OSError:  # nobody listens any more
        os.killpg(child.pid, signal.SIGKILL)
    finally:
        child.wait()
        child.stdout.close()
        child.stderr.close()


def pump(sock: socket.socket, child: subprocess.Popen[bytes]) -> None:
    """Send on what the child prints until it has ended; OSError when the other end hangs up.

    What it leaves in the background may keep its pipes open; nobody waits for that.
    """
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ, b"o")
        selector.register(child.stderr, selectors.EVENT_READ, b"e")
        selector.register(sock, selectors.EVENT_READ, None)
        while True:
            ended = child.poll() is not None
            ready = selector.select(timeout=0 if ended else 0.1)
            for key, _ in ready:
                data = os.read(key.fd, 65536)
                if data:
                    send(sock, key.data, data)
                elif key.data is None:
                    raise ConnectionResetError
                else:
                    selector.unregister(key.fileobj)
            if ended and not ready:
                return


def send(sock: socket.socket, kind: bytes, data: bytes) -> None:
    """One frame."""
    sock.sendall(struct.pack("!cI", kind, len(data)) + data)


# ---------------------------------------------------------------- process 1


def run_machine() -> None:
    """Everything but what only process 1 can do; a child of it."""
    port = open_port()
    try:
        set_up()
        start_all()
        start_docker()
        server = socket.create_server((ADDRESS, PORT), backlog=64)
        server_thread = threading.Thread(target=serve, args=(server,), daemon=True)
        server_thread.start()
        tell(port, {"event": "booted"})
        obey(port)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        tell(port, {"event": "failed", "why": str(error)})
        raise
    if run["token"]:  # else nobody has taken the machine, and nobody will
        server_thread.join()


def main() -> None:
    """Collect whoever ends without a parent; power off when our one child does."""
    child = os.fork()
    if child == 0:
        run_machine()
        os._exit(1)
    while os.wait()[0] != child:
        pass
    Path("/proc/sysrq-trigger").write_text("o")
    time.sleep(60)


main()
