"""``rdmalab lab``: JupyterLab on loopback in the labs' folder, the hosts coming up beside it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

from .errors import MachineError, UsageError
from .paths import cache_dir

__all__ = ["labs_folder", "serve"]

END_S = 15.0  # JupyterLab ends its kernels first
QUIET = {
    "@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False}
}


def labs_folder() -> Path:
    """Where the labs are: ``RDMALAB_LABS``, the checkout's ``labs/``, or the current folder."""
    override = os.environ.get("RDMALAB_LABS")
    if override:
        return Path(override)
    checkout = Path(__file__).parent.parent / "labs"
    return checkout if checkout.is_dir() else Path.cwd()


def environment() -> dict[str, str]:
    """JupyterLab's environment: its folders are writable ones, also where HOME is not."""
    env = dict(os.environ)
    home = os.path.expanduser("~")
    if not os.access(home, os.W_OK):
        base = cache_dir() / "jupyter"
        for name, folder in (
            ("JUPYTER_RUNTIME_DIR", "runtime"),
            ("JUPYTER_CONFIG_DIR", "config"),
            ("JUPYTER_DATA_DIR", "data"),
            ("IPYTHONDIR", "ipython"),
            ("MPLCONFIGDIR", "matplotlib"),
        ):
            (base / folder).mkdir(mode=0o700, parents=True, exist_ok=True)
            env.setdefault(name, str(base / folder))
    return env


def settings_folder() -> Path:
    """A folder with JupyterLab's settings that a learner should meet: no news pop-up."""
    folder = cache_dir() / "lab-settings"
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / "overrides.json").write_text(json.dumps(QUIET))
    return folder


def server_command(*, browser: bool, ip: str, port: int) -> list[str]:
    """JupyterLab's command line: a token of its own making, no news pop-up."""
    screen = sys.platform == "darwin" or {"DISPLAY", "WAYLAND_DISPLAY"} & set(os.environ)
    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        f"--ServerApp.root_dir={labs_folder().resolve()}",
    ]
    command += [f"--ServerApp.ip={ip}", f"--ServerApp.port={port}"]
    if ip == "0.0.0.0":  # in a container; who reads its address is outside
        command += [f"--ServerApp.custom_display_url=http://127.0.0.1:{port}/"]
    command += ["--ServerApp.port_retries=50", f"--LabApp.app_settings_dir={settings_folder()}"]
    command += ["--KernelManager.transport_encryption=auto"]  # or any user here could listen in
    command += [] if browser and screen else ["--no-browser"]
    return command + (["--allow-root"] if os.getuid() == 0 else [])


def leash() -> list[str]:
    """In front of a command: let it be asked to end when this process is gone, killed or not."""
    return ["setpriv", "--pdeathsig", "TERM", "--"] if shutil.which("setpriv") else []


def end(process: subprocess.Popen[bytes], signum: int) -> None:
    """Ask a process to end, in its own way; insist after a while."""
    process.send_signal(signum)
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def check_address(ip: str) -> None:
    """Raise :class:`UsageError` unless a server can listen at this address of this machine."""
    try:
        family = socket.getaddrinfo(ip, 0, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family) as listener:
            listener.bind((ip, 0))
    except OSError as error:
        raise UsageError(
            f"JupyterLab cannot listen at {ip!r} ({error.strerror}): this machine has no such"
            " address.",
            next_step="Without --ip it listens on 127.0.0.1, for this machine only; 0.0.0.0 is for"
            " a container.",
        ) from None


def serve(*, lab: str | None, browser: bool, ip: str, port: int) -> None:
    """Run JupyterLab until it ends; the hosts stay up (``rdmalab down`` stops them).

    They are started beside it by ``rdmalab up``, a process of its own that can be interrupted. If
    that fails it says so, and the first cell that needs the hosts says so again. Raises
    :class:`MachineError` if JupyterLab does not run, :class:`UsageError` for a wrong address.
    """
    check_address(ip)
    env = environment()
    if lab:
        env["RDMALAB_LAB"] = lab
    start = [*leash(), sys.executable, "-m", "rdmalab", "up"]
    hosts = subprocess.Popen(start, env=env, stdin=subprocess.DEVNULL, stdout=sys.stderr)
    server = None
    try:
        command = [*leash(), *server_command(browser=browser, ip=ip, port=port)]
        # In the labs' folder, where nbgrader looks for its settings.
        server = subprocess.Popen(command, env=env, cwd=labs_folder())
        server.wait()
    except KeyboardInterrupt:
        pass
    except OSError as error:
        raise MachineError(
            f"JupyterLab does not start ({error}).", next_step="make setup"
        ) from None
    finally:
        if server is not None:
            end(server, signal.SIGTERM)
        end(hosts, signal.SIGINT)
    if server is not None and server.returncode not in (0, -signal.SIGTERM, -signal.SIGINT):
        raise MachineError(
            f"JupyterLab ended with exit code {server.returncode}; what it says above tells why.",
            next_step="Is it installed? make setup installs it.",
        )
