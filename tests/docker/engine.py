"""A Docker engine as these tests use it: by the command line, with a deadline on everything."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["BASE", "ROOT", "Engine", "build", "client", "compose_command", "why_no_engine"]

ROOT = Path(__file__).parents[2]
BASE = "debian:trixie-slim"
BUILD_S = 1500
# Debian's own slim image leaves these out, too.
SLIM = ("doc/*", "info/*", "lintian/*", "locale/*", "man/*")
# Where this machine reaches Debian's and Python's packages in a way of its own.
CA = ("PIP_CERT", "SSL_CERT_FILE")
SYSTEM_CA = "/etc/ssl/certs/ca-certificates.crt"


def client() -> str | None:
    """A docker program that builds with BuildKit: 20.10's own, or a later one with buildx."""
    for folder in os.get_exec_path():
        path = shutil.which("docker", path=folder)
        if path is None:
            continue
        version = run([path, "--version"])
        found = re.search(r"version (\d+)", version.stdout)
        if found and int(found[1]) < 23:
            return path
        if run([path, "buildx", "version"]).returncode == 0:
            return path
    return None


def compose_command() -> list[str] | None:
    """``docker compose``, or the older ``docker-compose``."""
    docker = client()
    if docker and run([docker, "compose", "version"]).returncode == 0:
        return [docker, "compose"]
    old = shutil.which("docker-compose")
    return [old] if old else None


def why_no_engine() -> str:
    """Why nothing here can be run; empty if an engine answers."""
    docker = client()
    if docker is None:
        return "no docker program that builds with BuildKit (Debian: docker.io)"
    if compose_command() is None:
        return "neither docker compose nor docker-compose"
    answer = run([docker, "version", "--format", "{{.Server.Version}}"])
    return "" if answer.returncode == 0 else f"no Docker engine answers: {answer.stderr.strip()}"


def run(
    command: list[str], deadline_s: float = 120, **more: object
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, both outputs as text; never an error."""
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=deadline_s,
        check=False,
        **more,  # type: ignore[call-overload]
    )


class Engine:
    """An engine, by default the machine's own; what a test makes carries its label."""

    def __init__(self, host: str = "") -> None:
        self.label = f"rdmalab-test={os.getpid()}"
        self.env = {**os.environ, "DOCKER_BUILDKIT": "1", **({"DOCKER_HOST": host} if host else {})}
        self.program = client() or "docker"

    def ask(self, *words: str, deadline_s: float = 120) -> subprocess.CompletedProcess[str]:
        """``docker WORDS``, whatever comes of it."""
        return run([self.program, *words], deadline_s, env=self.env)

    def __call__(self, *words: str, deadline_s: float = 120) -> str:
        """``docker WORDS``: what it printed; an AssertionError with all of it if it failed."""
        done = self.ask(*words, deadline_s=deadline_s)
        assert done.returncode == 0, f"docker {' '.join(words)}:\n{done.stdout}\n{done.stderr}"
        return done.stdout.strip()

    @contextlib.contextmanager
    def container(self, *words: str) -> Iterator[str]:
        """A container that runs in the background; its id. It is removed in the end."""
        name = self("run", "--detach", "--label", self.label, *words)
        try:
            yield name
        finally:
            self("rm", "--force", "--volumes", name)


def settings() -> list[str]:
    """This machine's own way to the packages, as build secrets."""
    words = []
    bundles = [*(os.environ.get(name, "") for name in CA), SYSTEM_CA]
    bundles = [file for file in bundles if os.path.isfile(file)]
    if bundles:
        words += ["--secret", f"id=ca,src={os.path.realpath(bundles[0])}"]
    text = run(["apt-config", "dump", "--format", '%f "%v";%n', "Acquire"]).stdout
    lines = [line for line in text.splitlines() if re.match(r"Acquire::(Check|http|https)\b", line)]
    if lines:
        file = Path(tempfile.gettempdir()) / f"rdmalab-apt-{os.getuid()}.conf"
        file.write_text("\n".join(lines) + "\n")
        words += ["--secret", f"id=apt,src={file}"]
    return words


def ensure_base(engine: Engine) -> None:
    """The base image: from a registry, or made of Debian's packages where none is reachable."""
    if engine.ask("image", "inspect", BASE).returncode == 0:
        return
    if engine.ask("pull", BASE).returncode == 0:
        return
    with tempfile.TemporaryDirectory() as folder:
        tar = f"{folder}/base.tar"
        excludes = [f"--dpkgopt=path-exclude=/usr/share/{name}" for name in SLIM]
        copyright = "--dpkgopt=path-include=/usr/share/doc/*/copyright"
        made = run(
            ["mmdebstrap", "--variant=minbase", *excludes, copyright, "trixie", tar], BUILD_S
        )
        assert made.returncode == 0, made.stderr
        engine("import", tar, BASE)


def build(engine: Engine, tag: str) -> None:
    """``docker build`` from this checkout, as the Dockerfile says; one at a time on a machine."""
    with open(Path(tempfile.gettempdir()) / f"rdmalab-build-{os.getuid()}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ensure_base(engine)
        file = str(ROOT / "docker" / "Dockerfile")
        words = ["build", "--progress", "plain", "--file", file, "--tag", tag]
        engine(*words, *settings(), str(ROOT), deadline_s=BUILD_S)
