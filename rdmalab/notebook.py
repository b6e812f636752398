"""``rdmalab lab``: JupyterLab on 127.0.0.1 in the labs' folder, the hosts coming up beside it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from .errors import MachineError, RdmalabError
from .lab import ensure
from .paths import cache_dir, runtime_dir

__all__ = ["labs_folder", "serve"]

END_S = 15.0  # JupyterLab ends its kernels first
LEASH = ("setpriv", "--pdeathsig", "TERM", "--")  # ends JupyterLab when we are killed
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
        base = runtime_dir() / "jupyter"
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


def server_command(*, browser: bool, port: int) -> list[str]:
    """JupyterLab's command line: loopback only, a token of its own making, no news pop-up."""
    screen = sys.platform == "darwin" or {"DISPLAY", "WAYLAND_DISPLAY"} & set(os.environ)
    command = [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={labs_folder()}"]
    command += ["--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}"]
    command += ["--ServerApp.port_retries=50", f"--LabApp.app_settings_dir={settings_folder()}"]
    command += [] if browser and screen else ["--no-browser"]
    command += ["--allow-root"] if os.getuid() == 0 else []
    return [*LEASH, *command] if shutil.which(LEASH[0]) else command


def end(server: subprocess.Popen[bytes]) -> None:
    """Ask JupyterLab to end, with its kernels; insist after a while."""
    server.send_signal(signal.SIGTERM)
    try:
        server.wait(END_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def serve(*, lab: str | None, browser: bool, port: int, say: Callable[[str], None]) -> None:
    """Run JupyterLab until it ends; the hosts stay up (``rdmalab down`` stops them).

    Raises :class:`MachineError` if JupyterLab is not installed. A start of the hosts that fails is
    said, and said again by the first cell that needs them.
    """
    command = server_command(browser=browser, port=port)
    env = environment()
    if lab:
        env["RDMALAB_LAB"] = lab

    def start_hosts() -> None:
        try:
            state = ensure(lab=lab, say=say)
            names = " and ".join(host["name"] for host in state.hosts)
            say(f"{names} are up ({state.accel}, {state.ready_s:.1f} s)")
        except RdmalabError as error:
            say(str(error))

    hosts = threading.Thread(target=start_hosts, name="rdmalab-up", daemon=False)
    hosts.start()
    try:
        server = subprocess.Popen(command, env=env)
    except OSError as error:
        raise MachineError(
            f"JupyterLab does not start ({error}).", next_step="make setup"
        ) from None
    try:
        server.wait()
    except KeyboardInterrupt:
        end(server)
    finally:
        hosts.join(200)
    if server.returncode not in (0, -signal.SIGTERM, -signal.SIGINT):
        raise MachineError(
            f"JupyterLab ended with exit code {server.returncode}; what it says above tells why.",
            next_step="Is it installed? make setup installs it.",
        )
