"""``--fix``: lets apt-get install what is missing, as root or through sudo, after saying what."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from ..errors import MachineError
from . import packages
from .machine import run

__all__ = ["fix"]

LISTS = Path("/var/lib/apt/lists")
TRY_AGAIN = "Check the network and this machine's package sources, then try again."


def fix(test: bool = False) -> list[str]:
    """Install the system packages that are missing; answers with their names.

    Raises :class:`MachineError`, one sentence, where that cannot be done: no apt-get, no right to
    use it, or apt-get fails.
    """
    lacking = packages.missing(test)
    if not lacking:
        return []
    manager = next((name for name in packages.MANAGERS if shutil.which(name)), "")
    names = packages.names_for(manager or "apt-get", lacking)
    if manager != "apt-get":
        raise _foreign(manager, names, lacking)
    sudo = _privilege(names)
    say(f"rdmalab: installing {'through sudo' if sudo else 'as root'}: {' '.join(names)}")
    _install(sudo, names)
    still = packages.missing(test)
    if still:
        raise MachineError(
            f"apt-get has installed {' '.join(names)}, yet {_listing(still)} cannot be found.",
            next_step="Check PATH; a Python of your own must bring its own modules.",
        )
    return names


def say(text: str) -> None:
    """Progress goes to stderr: stdout belongs to the answer."""
    print(text, file=sys.stderr, flush=True)


def _listing(needs: Iterable[packages.Need]) -> str:
    return ", ".join(need.probe.removeprefix("python:") for need in needs)


def _foreign(manager: str, names: list[str], lacking: list[packages.Need]) -> MachineError:
    """What somebody on another system installs, as far as its package manager has it."""
    what = f"{_listing(lacking)} missing, and rdmalab installs only with apt-get."
    if not names:
        return MachineError(what, next_step="Use Debian or Ubuntu, or a container of theirs.")
    command = " ".join(packages.install_command(manager or "apt-get", names))
    return MachineError(what, next_step=f"Install yourself: `{command}`.")


def _privilege(names: list[str]) -> list[str]:
    """What goes before apt-get: nothing for root, sudo where it works; else one sentence."""
    if os.geteuid() == 0:
        return []
    sudo, why = shutil.which("sudo"), "there is no sudo"
    if sudo:
        if run([sudo, "-n", "true"])[0] == 0:
            return [sudo]
        why = "sudo cannot ask for your password here"
        if sys.stdin is not None and sys.stdin.isatty():
            say(f"rdmalab: sudo is needed once, to install: {' '.join(names)}")
            if subprocess.run([sudo, "-v"], check=False).returncode == 0:
                return [sudo]
            why = "sudo refused you"
    raise MachineError(
        f"You are not root and {why}, so ask an administrator to run"
        f" `apt-get install --no-install-recommends {' '.join(names)}`, then try again."
    )


def _install(sudo: list[str], names: list[str]) -> None:
    """Install; the lists of packages are fetched first where they are old or lead nowhere."""
    fetched = not lists_are_fresh(LISTS)
    if fetched:
        _apt([*sudo, "apt-get", "-q", "update"], "fetch the lists of packages")
    install = [*sudo, *packages.install_command("apt-get", names)]
    if fetched:
        _apt(install, f"install {' '.join(names)}")
        return
    if stream(install)[0] != 0:
        _apt([*sudo, "apt-get", "-q", "update"], "fetch the lists of packages")
        _apt(install, f"install {' '.join(names)}")


def _apt(command: list[str], what: str) -> None:
    code, tail = stream(command)
    if code != 0:
        said = [line for line in tail if line.startswith(("E:", "dpkg: error"))] or tail[-1:]
        reason = said[0].strip() if said else f"exit code {code}"
        raise MachineError(f"apt-get could not {what} ({reason}).", next_step=TRY_AGAIN)


def lists_are_fresh(folder: Path, days: float = 3) -> bool:
    """Were the lists of packages fetched within the last days?

    The files carry the archive's date, so the folders tell when `apt-get update` ran.
    """
    try:
        if not any(folder.glob("*Packages*")):
            return False
        newest = max(path.stat().st_mtime for path in (folder, *folder.glob("partial")))
    except OSError:  # apt-get is replacing them just now
        return True
    return time.time() - newest < days * 24 * 3600


def stream(command: list[str]) -> tuple[int, list[str]]:
    """Run a command that takes long: its newest line on a terminal, its last ones returned."""
    live = sys.stderr.isatty()
    width = shutil.get_terminal_size().columns - 1
    tail: list[str] = []
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            tail = [*tail[-30:], line.rstrip()]
            if live:
                print(f"\r\033[K{tail[-1][:width]}", end="", file=sys.stderr, flush=True)
    if live:
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    return process.returncode, tail
