"""A host's output in the notebook or terminal: text as it comes, pictures as they are.

Long output is cut in the middle (first lines, last lines) and goes in full to a file. A host's
stderr is shown on stdout, marked with the host's name: nbgrader takes stderr text for a failure.
"""

from __future__ import annotations

import collections
import sys
import time
from typing import Any, TextIO

from .paths import cache_dir

__all__ = ["HEAD_CHARS", "LOG_CHARS", "Recording", "Relay"]

HEAD_CHARS = 100_000  # of text that is shown as it comes
TAIL_LINES = 20
TAIL_LINE_CHARS = 500
LOG_CHARS = 64 << 20  # of text that is kept in a file; an endless print must not fill a disk
LOGS_KEPT = 4
DISPLAYS = ("display_data", "execute_result", "update_display_data", "clear_output")
DISPLAYS_KEPT = 200  # pictures and tables of a job in the background


class Relay:
    """Shows Jupyter output messages here. Call it with each message; a context manager.

    ``title`` is a line in front of the first output, if there is any: whose it is.
    """

    def __init__(self, host: str, *, title: str = "") -> None:
        self.host, self.title = host, title
        self.shown = 0
        self.cut = 0
        self.log: TextIO | None = None
        self.lost = ""  # why the file could not be written
        self.logged = 0
        self.head = ""
        self.tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
        self.partial = ""
        self.in_stderr = False

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __call__(self, message: dict[str, Any]) -> None:
        """Show one message of the kinds stream, display_data, execute_result, clear_output."""
        kind, content = message["msg_type"], message["content"]
        if kind == "stream":
            self.text(content["text"], stderr=content["name"] == "stderr")
        elif kind in ("display_data", "execute_result", "update_display_data"):
            self.show_title()
            self.rich(content, update=kind == "update_display_data")
        elif kind == "clear_output":
            self.clear(wait=bool(content.get("wait")))

    def text(self, text: str, *, stderr: bool = False) -> None:
        """A piece of a stream."""
        if stderr and not self.in_stderr:
            text = f"[{self.host} stderr] {text}"
        self.in_stderr = stderr
        room = HEAD_CHARS - self.shown
        if room > 0:
            self.write(text[:room])
            self.head += text[:room]
            self.shown += len(text[:room])
            text = text[room:]
        if text:
            self.overflow(text)

    def write(self, text: str) -> None:
        """To the notebook or terminal, below the title if there is one."""
        self.show_title()
        sys.stdout.write(text)
        sys.stdout.flush()

    def show_title(self) -> None:
        """The title, once, in front of the first output."""
        if self.title:
            print(self.title, flush=True)
            self.title = ""

    def overflow(self, text: str) -> None:
        """Text beyond what is shown: to the file, and its last lines kept."""
        self.cut += len(text)
        self.keep(text)
        lines = (self.partial + text[-TAIL_LINES * TAIL_LINE_CHARS :]).split("\n")
        self.partial = lines.pop()[-TAIL_LINE_CHARS:]
        self.tail.extend(line[-TAIL_LINE_CHARS:] for line in lines)

    def keep(self, text: str) -> None:
        """Write to the file, as far as it may grow; a full disk ends that and nothing else."""
        try:
            if self.log is None and not self.lost:
                self.log = new_log(self.host)
                self.log.write(self.head)
                self.logged = len(self.head)
            if self.log is not None and self.logged < LOG_CHARS:
                self.log.write(text[: LOG_CHARS - self.logged])
                self.logged += len(text)
        except OSError as error:
            self.lost = error.strerror or str(error)

    def end_log(self) -> str:
        """Close the file; in words, how much of the output is in it, and where it is."""
        path = ""
        try:
            if self.log is not None:
                path = self.log.name
                self.log.close()
        except OSError as error:
            self.lost = error.strerror or str(error)
        self.log = None
        if self.lost:
            return f"which could not be kept ({self.lost})"
        kept = "all of it" if self.logged < LOG_CHARS else f"its first {LOG_CHARS:,} characters"
        return f"{kept} in {path}"

    def rich(self, content: dict[str, Any], *, update: bool) -> None:
        """A picture, a table, a result: as it is in a notebook, its text elsewhere."""
        from IPython.core.getipython import get_ipython

        if get_ipython() is None:
            self.text(str(content["data"].get("text/plain", "")) + "\n")
            return
        from IPython.display import publish_display_data

        publish_display_data(
            data=content["data"],
            metadata=content.get("metadata", {}),
            transient=content.get("transient", {}),
            update=update,
        )

    def clear(self, *, wait: bool) -> None:
        """The host cleared its output."""
        from IPython.core.getipython import get_ipython

        if get_ipython() is not None:
            from IPython.display import clear_output

            clear_output(wait=wait)

    def close(self) -> None:
        """Show the end of what was cut, and where all of it is."""
        if not self.cut:
            return
        note = f"\n... {self.cut} characters more, {self.end_log()}; the last lines:\n"
        self.cut = 0
        lines = [*self.tail, *([self.partial] if self.partial else [])]
        self.write(note + "\n".join(lines) + "\n")


class Recording(Relay):
    """Output that is shown later, as often as wanted. No longer than what is shown at once."""

    def __init__(self, host: str) -> None:
        super().__init__(host)
        self.pieces: list[str | dict[str, Any]] = []
        self.displays = 0

    def __call__(self, message: dict[str, Any]) -> None:
        """Keep one message."""
        if message["msg_type"] == "stream":
            super().__call__(message)
        elif message["msg_type"] in DISPLAYS and self.displays < DISPLAYS_KEPT:
            self.displays += 1
            self.pieces.append(message)

    def write(self, text: str) -> None:
        """Keep text that is to be shown."""
        self.pieces.append(text)

    def show(self, title: str = "") -> None:
        """Show what was kept, below ``title`` if it is anything."""
        with Relay(self.host, title=title) as relay:
            for piece in self.pieces:
                if isinstance(piece, str):
                    relay.write(piece)
                else:
                    relay(piece)


def new_log(host: str) -> TextIO:
    """A file for output that is too long to show; of earlier ones the latest few stay."""
    folder = cache_dir() / "output"
    folder.mkdir(mode=0o700, exist_ok=True)
    for old in sorted(folder.glob("*.log"))[: 1 - LOGS_KEPT]:
        old.unlink(missing_ok=True)
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**9:09}-{host}.log"
    return open(folder / name, "w", encoding="utf-8")
