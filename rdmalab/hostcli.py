"""Commands on hosts that run: ``rdmalab exec`` and ``fault``."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from . import differences
from .errors import BackendError, UsageError

__all__ = ["Json", "LabOption", "exec_", "fault", "require_host", "running_state", "say"]

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
LabOption = Annotated[
    str | None, typer.Option("--lab", help="The lab's id (RDMALAB_LAB, else default).")
]


def say(text: str) -> None:
    """Progress, on stderr."""
    print(f"rdmalab: {text}", file=sys.stderr, flush=True)


def exec_(
    host: str,
    command: Annotated[list[str], typer.Argument(help="The command and its words, after --.")],
    lab: LabOption = None,
    root: Annotated[
        bool, typer.Option(help="As the host's administrator (NET_ADMIN, NET_RAW).")
    ] = False,
) -> None:
    """Run a command on a host; its output is streamed and its exit code passed on."""
    from .remote import Remote

    state = running_state(lab)
    require_host(state, host)
    code = 1
    with Remote(state) as remote:
        for item in remote.stream("exec", command, host=host, root=root):
            if isinstance(item, int):
                code = item
                break
            out = sys.stdout.buffer if item[0] == "stdout" else sys.stderr.buffer
            out.write(item[1])
            out.flush()
    raise typer.Exit(code if code >= 0 else 128 - code)


def running_state(lab: str | None) -> Any:
    """The state of a lab that runs; an error that says how to start it otherwise."""
    from . import lab as labs

    name = lab or labs.default_lab()
    found = labs.running(name)
    if found is None:
        raise BackendError(f"The lab {name!r} does not run.", next_step="Start it: rdmalab up")
    return found


def require_host(state: Any, host: str) -> None:
    """:class:`UsageError` if the lab has no such host."""
    names = [entry["name"] for entry in state.hosts]
    if host not in names:
        raise UsageError(f"This lab has no host {host!r}; it has {', '.join(names)}.")


def fault(
    host: str,
    settings: Annotated[
        list[str], typer.Argument(help="loss=5% delay=10ms rate=100mbit down clear")
    ],
    lab: LabOption = None,
) -> None:
    """Put a fault on a host's link, or clear it."""
    from .faults import apply, parse
    from .remote import Remote

    wanted = parse(settings)
    state = running_state(lab)
    require_host(state, host)
    differences.require_faults(state)
    with Remote(state) as remote:
        apply(remote, host, wanted)
    undo = "" if "clear" in wanted else f" Undo it with: rdmalab fault {host} clear"
    print(f"{host}: {' '.join(settings)}.{undo}")
