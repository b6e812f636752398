"""``rdmalab image``: build the guest image, look at it, carry it to a machine without network."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from .errors import ImageError, RdmalabError
from .image import GuestImage, Step, build_image, export_image, find_image, import_image

__all__ = ["image_app"]

image_app = typer.Typer(help="The guest image: build it, or carry it to a machine without network.")
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


@image_app.command()
def build(
    force: Annotated[bool, typer.Option(help="Build it again although it is there.")] = False,
    arch: Annotated[str | None, typer.Option(help="amd64 or arm64 (arm64 is untested).")] = None,
    as_json: Json = False,
) -> None:
    """Build the guest image from Debian packages (about a minute)."""
    found = None
    if not force:
        try:
            found = find_image(arch)
        except RdmalabError as error:
            say(str(error))
    with image_progress(quiet=as_json) as on_step:
        image = found or build_image(arch=arch, force=force, on_step=on_step)
    report_image(image, as_json, "is there already" if found else "is built")


@contextlib.contextmanager
def image_progress(*, quiet: bool) -> Iterator[Callable[[Step], None]]:
    """Yields the function that shows the steps of a build: a bar, lines, or nothing."""
    if quiet or not sys.stderr.isatty():
        seen: list[str] = []

        def plain(step: Step) -> None:
            if not quiet and step.name not in seen:
                seen.append(step.name)
                say(f"guest image, step {step.number} of {step.total}: {step.name}")

        yield plain
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, TextColumn("{task.fields[detail]}"), console=console) as bar:
        task = bar.add_task("guest image", total=1.0, detail="")

        def draw(step: Step) -> None:
            name = f"{step.number}/{step.total} {step.name}"
            done, detail = step.done_fraction, step.detail[:50]
            bar.update(task, description=name, completed=done, detail=detail)

        yield draw


def say(text: str) -> None:
    """Progress, on stderr."""
    print(f"rdmalab: {text}", file=sys.stderr, flush=True)


def report_image(image: GuestImage, as_json: bool, what: str) -> None:
    """Print an image's facts."""
    facts: dict[str, str | int] = {"id": image.id, "arch": image.arch, "folder": str(image.folder)}
    facts |= {"kernel": image.meta["kernel"], "created": image.meta["created"]}
    facts["size_bytes"] = image.size_bytes
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        size = f"{image.size_bytes / 1e6:.0f} MB"
        print(f"The guest image {image.id} {what}: kernel {facts['kernel']}, {image.arch}, {size}")
        print(f"  {image.folder}")


@image_app.command()
def info(as_json: Json = False) -> None:
    """What the guest image is made of."""
    image = find_image()
    if image is None:
        raise ImageError("There is no guest image yet.", next_step="Run: rdmalab image build")
    report_image(image, as_json, "is there")


@image_app.command("export")
def export_(file: Path) -> None:
    """Write the guest image into one file, for a machine without network."""
    image = export_image(file)
    print(f"The guest image {image.id} is in {file} ({file.stat().st_size / 1e6:.0f} MB).")


@image_app.command("import")
def import_(file: Path) -> None:
    """Take a guest image from a file that `image export` wrote."""
    report_image(import_image(file), False, "is imported")


@image_app.command()
def share(
    folder: Annotated[Path, typer.Argument(help="For others, as RDMALAB_SHARED_DIR.")],
    names: Annotated[list[str] | None, typer.Argument(help="Hosts (default: alice bob).")] = None,
    pack: Annotated[bool, typer.Option(help="Compress the saved memory, to be sent.")] = True,
) -> None:
    """Write the guest image and the saved start of these hosts into a folder for others."""
    from . import microvm, shared
    from .topology import DEFAULT_HOSTS, plan

    shared.prepare(folder)
    image, saved = microvm.saved_start(plan(tuple(names or DEFAULT_HOSTS)), say)
    shared.write(folder, image, saved, small=pack)
    print(f"Others start from {folder} when RDMALAB_SHARED_DIR names it.")
