"""What is installed: Python, QEMU, Docker, Jupyter, the guest image."""

from __future__ import annotations

import http.client
import importlib.metadata
import importlib.util
import json
import os
import re
import socket
import sys
from pathlib import Path

from ..errors import RdmalabError
from ..paths import shared_dirs
from . import packages
from .machine import ROOT, Check, first_line, run

__all__ = ["docker", "docker_hosts", "image", "jupyter", "python", "qemu", "system_packages"]

PYTHON_MIN = (3, 10)
QEMU_MIN = (7, 2)
DOCKER_SOCKET = Path("/var/run/docker.sock")


def python() -> Check:
    """Is this Python new enough?"""
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < PYTHON_MIN:
        step = "Install Python 3.10 or newer; Debian 12 and Ubuntu 22.04 have it."
        return Check("python", "fail", f"Python {version} is too old", step, "python_old")
    return Check("python", "ok", f"Python {version} ({sys.executable})", code="python_ok")


def system_packages(test: bool = False) -> Check:
    """Is everything there that the operating system has to give?

    What only the image build needs is no failure: an image can also be imported.
    """
    lacking = packages.missing(test)
    if shared_dirs() and not any(need.kind in ("run", "test") for need in lacking):
        detail = "what starts hosts is there; guest image and saved start are made by others"
        return Check("packages", "ok", detail, code="packages_shared")
    if not lacking:
        return Check("packages", "ok", "all system packages are there", code="packages_ok")
    names = " ".join(packages.names_for("apt-get", lacking))
    step = "`rdmalab doctor --fix` (or `make setup` before there is an rdmalab)."
    if any(need.kind != "build" for need in lacking):
        return Check("packages", "fail", f"missing: {names}", step, "packages_missing")
    detail = f"missing, to build the guest image: {names}"
    return Check("packages", "warn", detail, step, "build_packages_missing")


def qemu() -> Check:
    """Is QEMU for this architecture there, new enough and able to start?"""
    name, package = packages.qemu_program(), packages.NEEDS[0].apt
    path = packages.program(name)
    if path is None:
        step = f"`rdmalab doctor --fix`, or `apt-get install {package}`."
        return Check("qemu", "fail", f"{name} is not installed", step, "qemu_missing")
    code, text = run([path, "--version"])
    found = re.search(r"version (\d+)\.(\d+)(\.\d+)?", text)
    if code != 0 or not found:
        detail = f"{path} does not start: {first_line(text) or f'exit code {code}'}"
        step = f"`apt-get install --reinstall {package}`"
        return Check("qemu", "fail", detail, step, "qemu_broken")
    version = found.group(0).removeprefix("version ")
    if (int(found.group(1)), int(found.group(2))) < QEMU_MIN:
        detail = f"QEMU {version} ({path}) is older than 7.2"
        step = "Install QEMU 7.2 or newer; Debian 12 and Ubuntu 24.04 have it."
        return Check("qemu", "fail", detail, step, "qemu_old")
    return Check("qemu", "ok", f"QEMU {version} ({path})", code="qemu_ok")


def docker(path: Path = DOCKER_SOCKET) -> Check:
    """Does a Docker engine answer? Asked over its socket, so that no client is needed."""
    address = os.environ.get("DOCKER_HOST", f"unix://{path}")
    if not address.startswith("unix://"):
        return Check("docker", "ok", f"DOCKER_HOST is {address}, not asked", code="docker_remote")
    path = Path(address.removeprefix("unix://"))
    optional = "Only `--backend docker` needs it: "
    try:
        version = _engine_version(path)
    except PermissionError:
        step = optional + "join the group docker (whoever is in it is as good as root here)."
        return Check("docker", "warn", f"{path} is closed to you", step, "docker_permission")
    except FileNotFoundError:
        step = optional + "install and start a Docker engine (Debian: docker.io)."
        return Check("docker", "warn", f"no Docker engine at {path}", step, "docker_missing")
    except (OSError, http.client.HTTPException, LookupError, TypeError, ValueError) as error:
        step = optional + "start the engine (`sudo systemctl start docker`)."
        detail = f"nothing sensible answers at {path} ({error or type(error).__name__})"
        return Check("docker", "warn", detail, step, "docker_silent")
    return Check("docker", "ok", f"Docker engine {version}", code="docker_ok")


def docker_hosts(root: Path = ROOT) -> Check:
    """Can containers have RDMA devices of their own? Tried in one, if the hosts' image is there."""
    if not (root / "sys/module/rdma_rxe").is_dir():
        detail = f"this kernel ({os.uname().release}) has not loaded rdma_rxe"
        step = "`sudo modprobe rdma_rxe`, on Linux 7.1 or newer."
        return Check("docker hosts", "fail", detail, step, "docker_no_rxe")
    try:
        from .. import dockerengine, dockerimage, dockerproof
        from .. import image as guest

        client = dockerengine.connect()
        found = guest.find_image()
        name = dockerimage.present(client, found) if found else ""
        if not name:
            detail = "not tried: the hosts' Docker image is not made yet"
            step = "`rdmalab up --backend docker` makes it (of the guest image), and tries."
            return Check("docker hosts", "warn", detail, step, "docker_untried")
        failed, step = dockerproof.prove(client, name)
    except ImportError as error:
        step = "`make setup` brings Docker's Python package."
        return Check("docker hosts", "fail", f"{error}", step, "docker_sdk")
    except RdmalabError as error:
        return Check("docker hosts", "fail", error.what, error.next_step, "docker_engine")
    if failed:
        return Check("docker hosts", "fail", failed, step, "docker_no_device")
    detail = "a container made a Soft-RoCE device of its own"
    return Check("docker hosts", "ok", detail, code="docker_hosts_ok")


def _engine_version(path: Path) -> str:
    """Ask an engine who it is: GET /version over its Unix socket."""
    connection = http.client.HTTPConnection("localhost", timeout=5)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
        channel.settimeout(5)
        channel.connect(str(path))
        connection.sock = channel
        connection.request("GET", "/version")
        return str(json.load(connection.getresponse())["Version"])


def jupyter() -> Check:
    """Are JupyterLab and what talks to the hosts in this very Python?"""
    wanted = ("jupyterlab", "ipykernel", "jupyter_client")
    lacking = [name for name in wanted if not _importable(name)]
    if lacking:
        detail = f"{sys.executable} has no {', '.join(lacking)}"
        step = "`make setup` puts everything into .venv; then use .venv/bin/rdmalab."
        return Check("jupyter", "fail", detail, step, "jupyter_missing")
    version = importlib.metadata.version("jupyterlab")
    return Check("jupyter", "ok", f"JupyterLab {version}", code="jupyter_ok")


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the package above it
        return False


def image() -> Check:
    """Is the guest image there and whole?

    The one place where the doctor looks at something above it, and only when asked to.
    """
    from .. import image as guest

    try:
        found = guest.find_image()
    except RdmalabError as error:
        return Check("image", "fail", error.what, error.next_step, "image_damaged")
    if found:
        detail = f"guest image {found.id}, {found.size_bytes // 1_000_000} MB"
        return Check("image", "ok", detail, code="image_ok")
    step = "`rdmalab image build`, or `rdmalab image import FILE` without a network."
    if any(need.kind == "build" for need in packages.missing()):
        detail = "the guest image is not built, and what it takes to build it is missing"
        return Check("image", "fail", detail, step, "image_missing")
    return Check("image", "warn", "the guest image is not built yet", step, "image_missing")
