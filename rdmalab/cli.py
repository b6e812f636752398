"""The command line. Each command prints what it did, or with ``--json`` one JSON document.

Errors are one plain sentence with the next step, on stderr. Exit 0: done, 1: failed, 2: wrong
usage.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from .errors import RdmalabError, UsageError
from .imagecli import image_app

__all__ = ["main"]

app = typer.Typer(
    help="Real RDMA verbs on any machine: Soft-RoCE hosts for JupyterLab.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(image_app, name="image", no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
LabOption = Annotated[
    str | None, typer.Option("--lab", help="The lab's id (RDMALAB_LAB, else default).")
]
BackendOption = Annotated[str, typer.Option(help="auto, vm, docker or local.")]


def say(text: str) -> None:
    """Progress, on stderr."""
    print(f"rdmalab: {text}", file=sys.stderr, flush=True)


def show(document: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(document, indent=2))


@app.command()
def doctor(
    fix: Annotated[
        bool, typer.Option(help="Install what is missing (apt-get, root or sudo).")
    ] = False,
    test: Annotated[bool, typer.Option(help="Also what the tests need.")] = False,
    backend: Annotated[str, typer.Option(help="What is to work: vm, docker or local.")] = "vm",
    as_json: Json = False,
) -> None:
    """Check this machine, one line each, with the fix."""
    from .doctor.__main__ import main as run_doctor

    flags = (("--fix", fix), ("--test", test), ("--json", as_json))
    words = [word for word, wanted in flags if wanted]
    raise typer.Exit(run_doctor([*words, "--backend", backend]))


@app.command()
def up(
    names: Annotated[list[str] | None, typer.Argument(help="Hosts (default: alice bob).")] = None,
    backend: BackendOption = "auto",
    lab: LabOption = None,
    as_json: Json = False,
) -> None:
    """Start the hosts; does nothing if they run already."""
    from .lab import ensure

    state = ensure(names or (), lab=lab, backend=backend, say=say)
    if as_json:
        show(state.public())
        return
    how = "restored" if state.restored else "first start"
    why = "" if state.accel == "kvm" else f", because {state.accel_why}"
    print(f"Lab {state.lab} is up after {state.ready_s:.1f} s ({how}; {state.accel}{why}).")
    for host in state.hosts:
        print(
            f"  {host['name']:<12} {host['ip']:<10} {host['device']:<16}"
            f" GID {host['gid']} (index {host['gid_index']}), path MTU {host['mtu']}"
        )


@app.command()
def status(as_json: Json = False) -> None:
    """What runs, and what is left over of labs that do not."""
    from . import lab

    running = list(lab.labs())
    left = [name for name in lab.known() if name not in {s.lab for s in running}]
    if as_json:
        show({"labs": [s.public() for s in running], "leftovers": left})
        return
    for found in running:
        names = ", ".join(host["name"] for host in found.hosts)
        print(f"{found.lab}: {names} ({found.backend}, {found.accel}: {found.accel_why})")
    for name in left:
        print(f"{name}: not running; `rdmalab down --lab {name}` removes what is left of it")
    if not running and not left:
        print("No lab is running. `rdmalab up` starts one.")


@app.command()
def down(
    every: Annotated[bool, typer.Option("--all", help="All labs of this user.")] = False,
    lab: LabOption = None,
) -> None:
    """Stop a lab and remove all that it made, and nothing else."""
    from . import lab as labs

    own = lab or labs.default_lab()
    wanted = sorted({*labs.known(), own}) if every else [own]
    ended = [name for name in wanted if labs.down(name)]
    print(f"Stopped: {', '.join(ended)}." if ended else "Nothing was running.")


@app.command("exec", context_settings={"ignore_unknown_options": True})
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
    from .errors import BackendError

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


@app.command()
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
    with Remote(state) as remote:
        apply(remote, host, wanted)
    undo = "" if "clear" in wanted else f" Undo it with: rdmalab fault {host} clear"
    print(f"{host}: {' '.join(settings)}.{undo}")


@app.command()
def capture(
    host: Annotated[
        str | None, typer.Argument(help="Whose link (default: the first host).")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="A pcap file.")] = None,
    seconds: Annotated[float | None, typer.Option(min=0.1, help="End after so long.")] = None,
    count: Annotated[
        int | None, typer.Option(min=1, max=1_000_000, help="End after so many packets.")
    ] = None,
    lab: LabOption = None,
    as_json: Json = False,
) -> None:
    """Print the RoCEv2 packets on a host's link, decoded, until Ctrl-C."""
    from . import capturecli
    from .capture import MAX_PACKETS, Capture
    from .remote import Remote

    state = running_state(lab)
    name = host or state.hosts[0]["name"]
    require_host(state, name)
    with Remote(state) as remote:
        wire = Capture(remote, name, state.hosts, max_packets=count or MAX_PACKETS)
        capturecli.run(wire, output, seconds, as_json, say)


@app.command("lab")
def lab_(
    browser: Annotated[bool, typer.Option(help="Open a browser.")] = True,
    port: Annotated[int, typer.Option(help="JupyterLab's port; a free one from there on.")] = 8888,
    lab: LabOption = None,
) -> None:
    """JupyterLab in labs/, with the hosts started in the background."""
    from .notebook import serve

    serve(lab=lab, browser=browser, port=port)


@app.command()
def selftest(as_json: Json = False) -> None:
    """A whole rehearsal with hosts of its own; ends in one card for a bug report."""
    from .selftest import run

    card = run(say)
    if as_json:
        show(card.document())
    else:
        print(card.text())
    raise typer.Exit(0 if card.passed else 1)


@app.command()
def bench(as_json: Json = False) -> None:
    """TCP and RDMA between two hosts of its own, in Python beside C, with what it does not show."""
    from .bench import run

    report = run(say)
    if as_json:
        show(report.document())
    else:
        report.show()


_signals: list[int] = []  # that have asked this process to stop


def ended(signum: int, frame: object) -> None:
    """Ctrl-C, SIGTERM and SIGHUP end a command in the same way, once: clean-up is not disturbed."""
    _signals.append(signum)
    if len(_signals) == 1:
        raise KeyboardInterrupt


def main(words: list[str] | None = None) -> NoReturn:
    """The console script's entry: runs a command and turns errors into sentences."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, ended)
    run: Callable[..., Any] = app
    try:
        code = run(args=words, standalone_mode=False)
        if _signals:  # typer has made an exit code of it
            raise KeyboardInterrupt
        sys.exit(code if isinstance(code, int) else 0)
    except RdmalabError as error:
        print(f"rdmalab: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        print("rdmalab: interrupted.", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(1)
    except Exception as error:
        usage(error)


def usage(error: Exception) -> NoReturn:
    """Wrong words for a command (2), or an error that nobody foresaw (1, with how to report it)."""
    if isinstance(error, typer.TyperException):
        print(f"rdmalab: {error.format_message()} See: rdmalab --help", file=sys.stderr)
        sys.exit(2)
    if os.environ.get("RDMALAB_DEBUG"):
        raise error
    print(
        f"rdmalab: {type(error).__name__}: {error}. This is a fault of rdmalab: RDMALAB_DEBUG=1"
        " shows where; please report it with the card of `rdmalab selftest`.",
        file=sys.stderr,
    )
    sys.exit(1)
