"""The Docker engine of this machine, through its SDK, with errors that say what to do.

The SDK is imported when it is first needed: nobody else waits for it.
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import BackendError, MachineError
from .paths import runtime_dir

__all__ = ["connect", "explained", "labels", "ours", "reachable", "remove", "remove_one"]

SOCKET = Path("/var/run/docker.sock")
TIMEOUT_S = 300  # an emulated machine takes its time over a container
DOCTOR = "`rdmalab doctor --backend docker` says what to do."
LAB, OWNER, PLACE = "org.rdmalab.lab", "org.rdmalab.owner", "org.rdmalab.place"


def labels(lab: str) -> dict[str, str]:
    """What everything that a lab makes is marked with."""
    return {LAB: lab, OWNER: str(os.getuid()), PLACE: str(runtime_dir())}


def reachable() -> bool:
    """Whether there could be an engine at all, and this user may ask it."""
    address = os.environ.get("DOCKER_HOST", f"unix://{SOCKET}")
    return not address.startswith("unix://") or os.access(address.removeprefix("unix://"), os.W_OK)


@contextlib.contextmanager
def explained(doing: str) -> Iterator[None]:
    """The engine's errors as :class:`BackendError`; ``doing`` says what was asked of it."""
    import docker.errors
    import requests.exceptions

    try:
        yield
    except docker.errors.APIError as error:
        said = (error.explanation or str(error)).strip().rstrip(".")
        raise BackendError(f"Docker refused {doing}: {said}.", next_step=DOCTOR) from None
    except (docker.errors.DockerException, requests.exceptions.RequestException) as error:
        raise BackendError(
            f"Docker did not answer to {doing}: {error}.", next_step=DOCTOR
        ) from None


def connect() -> Any:
    """A client of an engine that runs on this very kernel. Raises :class:`MachineError`."""
    import docker
    import docker.errors
    import requests.exceptions

    if not reachable():
        what = "may not be asked by you" if SOCKET.exists() else "is not there"
        raise MachineError(f"The Docker engine at {SOCKET} {what}.", next_step=DOCTOR)
    try:
        client = docker.from_env(timeout=TIMEOUT_S)
        kernel = client.info()["KernelVersion"]
    except (docker.errors.DockerException, requests.exceptions.RequestException) as error:
        raise MachineError(f"No Docker engine answers: {error}.", next_step=DOCTOR) from None
    if kernel != platform.release():
        raise MachineError(
            f"The Docker engine runs on another kernel ({kernel}) than this one"
            f" ({platform.release()}), where the hosts' sockets and devices would be.",
            next_step="Use an engine of this machine, or the vm backend.",
        )
    return client


def ours(client: Any, lab: str) -> list[Any]:
    """All containers of a lab of this user, however far they are."""
    words = [f"{name}={value}" for name, value in labels(lab).items()]
    found: list[Any] = client.api.containers(all=True, filters={"label": words})
    return found


def remove(client: Any, lab: str) -> bool:
    """Remove all of a lab's containers; True if there was any."""
    there = ours(client, lab)
    for container in there:
        remove_one(client, container["Id"])
    return bool(there)


def remove_one(client: Any, container: str) -> None:
    """Remove a container, unless it has gone or is going."""
    import docker.errors

    try:
        client.api.remove_container(container, force=True, v=True)
    except docker.errors.NotFound:
        pass
    except docker.errors.APIError as error:
        if error.status_code != 409:  # it is being removed already
            raise
