"""The command line. Each command prints what it did, or with ``--json`` one JSON document.

Errors are one plain sentence with the next step, on stderr. Exit 0: done, 1: failed, 2: wrong
usage.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from . import capturecli, checkcli, gradecli, hostcli
from .errors import RdmalabError
from .hostcli import Json, LabOption, say
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
app.command("exec", context_settings={"ignore_unknown_options": True})(hostcli.exec_)
app.command()(hostcli.fault)
app.command()(capturecli.capture)
app.command()(checkcli.check)
app.command()(gradecli.grade)

BackendOption = Annotated[str, typer.Option(help="auto, vm, docker or local.")]


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
    how = how if state.backend == "vm" else f"{state.backend} backend"
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


@app.command("lab")
def lab_(
    browser: Annotated[bool, typer.Option(help="Open a browser.")] = True,
    port: Annotated[
        int,
        typer.Option(help="JupyterLab's port; a free one from there on.", envvar="JUPYTER_PORT"),
    ] = 8888,
    ip: Annotated[
        str,
        typer.Option(help="Where it listens; 0.0.0.0 in a container, whose network is its own."),
    ] = "127.0.0.1",
    lab: LabOption = None,
) -> None:
    """JupyterLab in labs/, with the hosts started in the background."""
    from .notebook import serve

    serve(lab=lab, browser=browser, ip=ip, port=port)


@app.command()
def labs(
    folder: Annotated[Path, typer.Argument(help="Made if need be.")],
    source: Annotated[
        Path | None, typer.Option("--from", help="Where they come from (default: the checkout).")
    ] = None,
) -> None:
    """Lay the labs into a folder of your own; what you have changed there is kept."""
    from .notebook import labs_folder
    from .workfolder import fill

    for sentence in fill(folder, source or labs_folder()):
        say(sentence)


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

    run(say).show(as_json)


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
        print("rdmalab: interrupted.", file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        # Python ends by SIGINT instead if the interrupt ever met a C extension as it was imported,
        # although it was handled here. All that was begun is cleaned up by now.
        os._exit(130)
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
