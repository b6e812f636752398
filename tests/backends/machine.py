"""A machine with Soft-RoCE in its kernel and a Docker engine, emulated, for whoever has neither.

::

    with started(checkout) as machine:
        machine.run("rdmalab up --backend docker").out

or by hand, from a checkout::

    python -m tests.backends.machine run 'rdma link; docker info'    # a machine for one command
    python -m tests.backends.machine up                              # one that stays, until `down`
    python -m tests.backends.machine run 'python -m pytest -x tests/unit'
    python -m tests.backends.machine down

In it /checkout is the checkout as it is now (read-only), PYTHONPATH has it and all packages that
pyproject.toml asks for, rdmalab's cache has this machine's guest image, commands run as root. It
reaches no network; only who knows its token can run commands in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from rdmalab import qmp
from rdmalab.bootport import collect
from rdmalab.errors import RdmalabError, UsageError
from rdmalab.paths import runtime_dir

from .disks import ROOT
from .orders import Machine, Ran
from .saved import NAME, Parts, find_or_save, restore

__all__ = ["Machine", "Ran", "boot", "end", "started"]

Say = Callable[[str], None]


@contextlib.contextmanager
def started(checkout: Path = ROOT, say: Say = print) -> Iterator[Machine]:
    """A machine that ends with the block, and, however it ends, with this process."""
    machine = boot(checkout, say, stays=False)
    try:
        yield machine
    finally:
        end(Path(machine.folder))


def boot(checkout: Path, say: Say, *, stays: bool) -> Machine:
    """Start a machine: restored, and first made if need be. One that ``stays`` outlives us."""
    if not (checkout / "rdmalab").is_dir():
        raise UsageError(f"{checkout} is no checkout of rdmalab.")
    parts = Parts.found(checkout, say)
    folder = Path(tempfile.mkdtemp(prefix=f"{NAME}-", dir=runtime_dir()))
    try:
        saved = find_or_save(parts, folder, say)
        return restore(parts, folder, saved, stays=stays)
    except BaseException:
        end(folder)
        raise


def end(folder: Path) -> None:
    """Turn a machine off; nothing of it is left."""
    qmp.end_qemu(folder / "qmp.sock")
    collect()
    shutil.rmtree(folder)


# ---------------------------------------------------------------- by hand


def main(words: Sequence[str]) -> int:
    """``up``, ``run COMMAND``, ``down``; the exit code of the command, or 1."""
    kept = runtime_dir() / f"{NAME}.json"
    running = Machine(**json.loads(kept.read_text())) if kept.exists() else None
    if list(words) == ["up"] and not running:
        machine = boot(ROOT, tell, stays=True)
        kept.touch(mode=0o600)
        kept.write_text(json.dumps(asdict(machine)))
    elif list(words) == ["down"] and running:
        kept.unlink()
        end(Path(running.folder))
    elif len(words) == 2 and words[0] == "run":
        with contextlib.nullcontext(running) if running else started(say=tell) as machine:
            return machine.run(words[1], timeout_s=3600, check=False, hear=pass_on).code
    elif list(words) not in (["up"], ["down"]):
        raise UsageError("Say up, run COMMAND or down.")
    return 0


def tell(text: str) -> None:
    """What goes on, for who waits."""
    print(f"test machine: {text}", file=sys.stderr, flush=True)


def pass_on(kind: str, data: bytes) -> None:
    """A command's output, as if it had run here."""
    os.write(1 if kind == "o" else 2, data)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except RdmalabError as error:
        sys.exit(f"test machine: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
