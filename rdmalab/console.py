"""What a guest and its QEMU said: their last words for an error, all of it kept as a log."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple

from .paths import cache_dir

__all__ = ["Said", "said_in"]

LOGS_KEPT = 10
SHOWN_LINES = 6
SHOWN_WIDTH = 200


class Said(NamedTuple):
    """QEMU's output without its command line, and the guest's console."""

    command: str
    qemu: str
    guest: str

    @property
    def panicked(self) -> bool:
        """Whether the guest's kernel gave up."""
        return "Kernel panic" in self.guest

    def shown(self) -> str:
        """The lines that tell why it ended, indented, between line ends; a space if there are
        none."""
        lines = [*self.qemu.splitlines()[-3:], *last_words(self.guest)]
        return "\n".join(["", *(f"  {line[:SHOWN_WIDTH]}" for line in lines), ""]) if lines else " "

    def keep(self, name: str) -> str:
        """Keep all of it as ``logs/KIND-....log`` in the cache, the newest few of a kind; a
        sentence that says where it is."""
        file = cache_dir() / "logs" / f"{name}.log"
        try:
            file.parent.mkdir(exist_ok=True)
            file.write_text(f"{self.command}\n{self.qemu}\n{self.guest}\n", encoding="utf-8")
        except OSError as error:
            return f"Its log could not be kept ({error.strerror})."
        kind = name.partition("-")[0]
        for old in sorted(file.parent.glob(f"{kind}-*.log"), key=age)[:-LOGS_KEPT]:
            old.unlink(missing_ok=True)
        return f"Its log is {file}."


def said_in(folder: Path) -> Said:
    """What the machine of the lab with this folder has said so far; empty where there is none."""
    texts = {"qemu.log": "", "console.log": ""}
    for name in texts:
        with contextlib.suppress(OSError):
            texts[name] = (folder / name).read_text(errors="replace").strip()
    command, _, qemu = texts["qemu.log"].partition("\n")
    return Said(command, qemu, texts["console.log"])


def age(file: Path) -> float:
    """When it was last written, in seconds; 0 for one that another process has just removed."""
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def last_words(console: str) -> list[str]:
    """The lines of a guest's console that tell why it ended: the kernel's complaint, a traceback,
    or else the last ones."""
    lines = [line for line in console.splitlines() if "\x1b[33m" not in line]
    for mark in ("Oops", "BUG:", "Kernel panic"):
        found = [i for i, line in enumerate(lines) if mark in line]
        if found:
            rip = [line for line in lines[found[0] :] if "RIP:" in line]
            return [lines[found[0]], *rip[:1]]
    traces = [i for i, line in enumerate(lines) if line.startswith("Traceback")]
    if not traces:
        last = lines[-SHOWN_LINES:]
        return [line.replace("\x1b[0m", "").replace("\x1b[32m", "") for line in last]
    trace = lines[traces[-1] :]
    end = next((i for i, line in enumerate(trace) if i and not line.startswith(" ")), len(trace))
    return trace[: end + 1]
