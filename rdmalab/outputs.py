"""A host's output in the notebook or terminal: text as it comes, pictures as they are.

Long output is cut in the middle (first lines, last lines) and goes in full to a file. A host's
stderr is shown on stdout, marked with the host's name: nbgrader takes stderr text for a failure.
"""

from __future__ import annotations

import collections
import sys
import time
from typing import Any, TextIO

from .paths import runtime_dir

__all__ = ["HEAD_BYTES", "LOG_BYTES", "Relay"]

HEAD_BYTES = 100_000  # of text that is shown as it comes
TAIL_LINES = 20
TAIL_LINE_CHARS = 500
LOG_BYTES = 64 << 20  # of text that is kept in the file; an endless print must not fill a disk


class Relay:
    """Shows Jupyter output messages here. Call it with each message; a context manager.

    ``prefix=True`` puts the host's name in front of each line, for several hosts at once.
    """

    def __init__(self, host: str, *, prefix: bool = False) -> None:
        self.host, self.prefix = host, prefix
        self.shown = 0
        self.cut = 0
        self.log: TextIO | None = None
        self.logged = 0
        self.head = ""
        self.tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
        self.partial = ""
        self.at_line_start = True
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
            self.rich(content, update=kind == "update_display_data")
        elif kind == "clear_output":
            self.clear(wait=bool(content.get("wait")))

    def text(self, text: str, *, stderr: bool = False) -> None:
        """A piece of a stream."""
        if stderr and not self.in_stderr and not self.prefix:
            text = f"[{self.host} stderr] {text}"
        self.in_stderr = stderr
        room = HEAD_BYTES - self.shown
        if room > 0:
            self.write(text[:room])
            self.head += text[:room]
            self.shown += len(text[:room])
            text = text[room:]
        if text:
            self.overflow(text)

    def write(self, text: str) -> None:
        """To the notebook or terminal, with prefixes if they are wanted."""
        if self.prefix:
            mark = f"[{self.host}] "
            lines = text.splitlines(keepends=True) or [""]
            starts = [self.at_line_start] + [True] * (len(lines) - 1)
            self.at_line_start = text.endswith("\n")
            text = "".join(
                mark + line if start else line for start, line in zip(starts, lines, strict=True)
            )
        sys.stdout.write(text)
        sys.stdout.flush()

    def overflow(self, text: str) -> None:
        """Text beyond what is shown: to the file, and its last lines kept."""
        if self.log is None:
            folder = runtime_dir() / "output"
            folder.mkdir(mode=0o700, exist_ok=True)
            name = f"{self.host}-{time.strftime('%H%M%S')}-{time.monotonic_ns() % 10**6:06}.log"
            self.log = open(folder / name, "w", encoding="utf-8")  # noqa: SIM115 - closed in close
            self.log.write(self.head)
            self.logged = len(self.head)
        self.cut += len(text)
        if self.logged < LOG_BYTES:
            self.log.write(text[: LOG_BYTES - self.logged])
            self.logged += len(text)
        lines = (self.partial + text[-TAIL_LINES * TAIL_LINE_CHARS :]).split("\n")
        self.partial = lines.pop()[-TAIL_LINE_CHARS:]
        self.tail.extend(line[-TAIL_LINE_CHARS:] for line in lines)

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
        if self.log is None:
            return
        self.log.close()
        path, self.log = self.log.name, None
        kept = "all of it" if self.logged < LOG_BYTES else f"its first {LOG_BYTES >> 20} MiB"
        lines = [*self.tail, *([self.partial] if self.partial else [])]
        note = f"\n... {self.cut} characters more, {kept} in {path}; the last lines:\n"
        self.write(note + "\n".join(lines) + "\n")
