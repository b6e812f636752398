"""``%%on``, ``%wait`` and ``%hosts``: a host's cell behaves like a local one.

::

    %%on alice                    run this cell on alice
    %%on alice bob                on both, at the same time, outputs kept apart
    %%on bob --bg                 beside the next cells; %wait bob shows its output
    %%on alice --timeout 5        give up (and interrupt) after 5 s instead of 60
    %%on alice -o result          bring alice's variable `result` into the notebook
"""

from __future__ import annotations

import html
import shlex
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from IPython.core.completer import (
    CompletionContext,
    SimpleCompletion,
    SimpleMatcherResult,
    context_matcher,
)
from IPython.core.interactiveshell import InteractiveShell

from . import desk as desks
from . import differences, pulse
from . import lab as labs
from .errors import HostError, RdmalabError, UsageError
from .jobs import Job
from .kernels import DEFAULT_TIMEOUT_S
from .lab import Host, Lab

__all__ = ["OnLine", "load", "parse_on"]

COMPLETION_S = 1.0
_jobs: dict[str, Job] = {}  # the last background job of each host


@dataclass
class OnLine:
    """The words after ``%%on``."""

    hosts: list[str] = field(default_factory=list)
    background: bool = False
    timeout_s: float | None = DEFAULT_TIMEOUT_S
    fetch: list[str] = field(default_factory=list)


def parse_on(line: str) -> OnLine:
    """Read the words after ``%%on``. Raises :class:`UsageError` with a right example."""
    example = "For example: %%on alice, %%on alice bob, %%on bob --bg, %%on alice --timeout 5 -o x"
    wish = OnLine()
    given_timeout = False
    try:
        words = iter(shlex.split(line))
        for word in words:
            if word == "--bg":
                wish.background = True
            elif word == "--timeout":
                wish.timeout_s, given_timeout = float(next(words)), True
            elif word == "-o":
                wish.fetch.append(next(words))
            elif word.startswith("-"):
                raise UsageError(f"%%on has no option {word}.", next_step=example)
            else:
                wish.hosts.append(word)
    except (ValueError, StopIteration):
        raise UsageError(f"%%on {line}: an option lacks its value.", next_step=example) from None
    if not wish.hosts:
        raise UsageError("%%on needs a host's name.", next_step=example)
    if wish.background and not given_timeout:
        wish.timeout_s = None
    if wish.fetch and (wish.background or len(wish.hosts) > 1):
        raise UsageError(
            "-o brings a variable of one host whose cell has ended.", next_step=example
        )
    return wish


def current_lab() -> Lab:
    """The lab that this notebook talks to; started now if it does not run."""
    return labs.up()


def on(line: str, cell: str) -> Job | list[Job] | None:
    """The ``%%on`` cell magic."""
    wish = parse_on(line)
    lab = current_lab()
    hosts = [lab[name] for name in wish.hosts]
    if wish.background:
        jobs = [host.start(cell, timeout_s=wish.timeout_s) for host in hosts]
        _jobs.update((job.host, job) for job in jobs)
        return jobs[0] if len(jobs) == 1 else jobs
    if len(hosts) == 1:
        hosts[0].run(cell, timeout_s=wish.timeout_s)
    else:
        together(hosts, cell, wish.timeout_s)
    for name in wish.fetch:
        shell().user_ns[name] = hosts[0].get(name)
    return None


def together(hosts: list[Host], cell: str, timeout_s: float | None) -> None:
    """Run a cell on several hosts at once; outputs one after the other; raise the first error."""
    jobs = [host.start(cell, timeout_s=timeout_s) for host in hosts]
    first: BaseException | None = None
    try:
        for job in jobs:
            try:
                job.result(timeout_s=None, title=f"── {job.host} {'─' * 20}")
            except HostError as error:
                if first is not None:
                    print("\n".join(error._render_traceback_()))
                first = first or error
    except KeyboardInterrupt:
        with ThreadPoolExecutor() as pool:
            list(pool.map(Job.stop, jobs))
        raise
    if first is not None:
        raise first


def wait(line: str) -> None:
    """``%wait HOST [--timeout S]``: the host's background job; its output, and its error."""
    wish = parse_on(line)
    for name in wish.hosts:
        job = _jobs.get(name)
        if job is None:
            raise UsageError(
                f"No background job was started on {name}.", next_step=f"%%on {name} --bg"
            )
        job.result(timeout_s=wish.timeout_s)
        del _jobs[name]


def show_hosts(line: str = "") -> HostTable:
    """The ``%hosts`` line magic: the table of hosts."""
    return HostTable(current_lab())


class HostTable:
    """The lab's hosts as a table, for notebooks and terminals."""

    HEAD = ("host", "address", "RDMA device", "GID (index)", "path MTU", "kernel")

    def __init__(self, lab: Lab) -> None:
        states = lab.remote.call("hello")["hosts"]
        self.title = f"lab {lab.id}: {lab.state.backend} backend, {lab.state.accel}"
        if differs := differences.note(lab.state):
            self.title += f": {differs}"
        self.rows = [
            (h.name, h.ip, h.device, f"{h.gid} ({h.gid_index})", str(h.mtu), states[h.name])
            for h in lab.hosts
        ]

    def __repr__(self) -> str:
        rows = [self.HEAD, *self.rows]
        widths = [max(len(row[i]) for row in rows) for i in range(len(self.HEAD))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            for row in rows
        ]
        return "\n".join([self.title, *(line.rstrip() for line in lines)])

    def _repr_html_(self) -> str:
        head = "".join(
            f'<th style="text-align:left">{html.escape(name)}</th>' for name in self.HEAD
        )
        cell = '<td style="text-align:left">{}</td>'
        body = "".join(
            "<tr>" + "".join(cell.format(html.escape(text)) for text in row) + "</tr>"
            for row in self.rows
        )
        caption = f"<caption>{html.escape(self.title)}</caption>"
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def friendly(function: Callable[..., Any]) -> Callable[..., Any]:
    """A magic whose errors are ours: shown as a sentence, raised all the same."""

    def wrapped(*args: Any) -> Any:
        try:
            return function(*args)
        except RdmalabError as error:
            raise error.with_traceback(None) from None

    wrapped.__doc__ = function.__doc__
    return wrapped


@context_matcher()  # type: ignore[untyped-decorator] # IPython has no types there
def complete_on_host(context: CompletionContext) -> SimpleMatcherResult:
    """Completion inside a ``%%on`` cell, from the host's own name space; gives up when busy."""
    first, newline, cell = context.full_text.partition("\n")
    if not first.startswith("%%on ") or not newline:
        return {"completions": []}
    before = context.full_text.split("\n")[: context.cursor_line]
    cursor = sum(len(text) + 1 for text in before) + context.cursor_position - len(first) - 1
    try:
        host = current_lab()[parse_on(first[len("%%on ") :]).hosts[0]]
        begin = time.monotonic()
        found = host.kernel.complete(cell, cursor, COMPLETION_S)
    except RdmalabError:
        return {"completions": []}
    if found is None or time.monotonic() - begin > COMPLETION_S + 0.5:
        return {"completions": []}
    token = context.token
    skip = len(token) - (cursor - found["cursor_start"])
    matches = [SimpleCompletion(token[: max(0, skip)] + text) for text in found["matches"]]
    return {"completions": matches, "suppress": True}


def shell() -> InteractiveShell:
    """The notebook's own shell."""
    return InteractiveShell.instance()


def load(ip: Any) -> None:
    """Register the magics; called by ``%load_ext rdmalab``, also a second time."""
    ip.register_magic_function(friendly(on), "cell", "on")
    ip.register_magic_function(friendly(wait), "line", "wait")
    ip.register_magic_function(friendly(show_hosts), "line", "hosts")
    if complete_on_host not in ip.Completer.custom_matchers:
        ip.Completer.custom_matchers.append(complete_on_host)
    if not desks.is_here():  # there a judge looks at what hangs on to a kernel
        pulse.watch(ip)
