"""``%%on``, ``%wait``, ``%hosts`` and completion, in a real notebook kernel on the shared hosts."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

import rdmalab

pytestmark = [pytest.mark.fabric, pytest.mark.timeout(300)]

PATIENCE_S = 90
SHOWN_MAX = 2_000_000  # characters of a saved notebook (B55)


@dataclass
class Shown:
    """What one cell shows: text by stream, displays by MIME type, and its error."""

    stdout: str = ""
    stderr: str = ""
    displays: list[dict[str, Any]] = field(default_factory=list)
    error: dict[str, Any] | None = None
    cleared: int = 0

    @property
    def size(self) -> int:
        """Characters that a saved notebook would hold."""
        return len(self.stdout) + len(self.stderr) + sum(len(str(d)) for d in self.displays)

    def take(self, message: dict[str, Any]) -> None:
        """One message of the output channel."""
        kind, content = message["msg_type"], message["content"]
        if kind == "stream":
            setattr(self, content["name"], getattr(self, content["name"]) + content["text"])
        elif kind in ("display_data", "execute_result", "update_display_data"):
            self.displays.append(content["data"])
        elif kind == "error":
            self.error = content
        elif kind == "clear_output":
            self.cleared += 1


class Notebook:
    """A Jupyter kernel as JupyterLab would start it, with ``%load_ext rdmalab``."""

    def __init__(self, lab: str, folder: Path) -> None:
        from jupyter_client.manager import start_new_kernel

        env = os.environ | {"RDMALAB_LAB": lab, "IPYTHONDIR": str(folder)}
        self.manager, self.client = start_new_kernel(startup_timeout=PATIENCE_S, env=env)
        assert self.run("%load_ext rdmalab").error is None

    def start(self, code: str) -> str:
        """Send a cell; returns its id."""
        return str(self.client.execute(code, allow_stdin=False))

    def finish(
        self,
        ident: str,
        until: Callable[[Shown], bool] | None = None,
        timeout_s: float = PATIENCE_S,
    ) -> Shown:
        """What a cell shows until it has ended, or until ``until`` says so."""
        shown, end = Shown(), time.monotonic() + timeout_s
        while time.monotonic() < end:
            message = self.client.get_iopub_msg(timeout=timeout_s)
            if message["parent_header"].get("msg_id") == ident:
                shown.take(message)
                if message["content"].get("execution_state") == "idle":
                    return shown
                if until is not None and until(shown):
                    return shown
        raise AssertionError(f"the cell did not end in {timeout_s} s; it showed {shown}")

    def begun(self, ident: str) -> None:
        """Wait until a cell runs."""
        while True:
            message = self.client.get_iopub_msg(timeout=PATIENCE_S)
            mine = message["parent_header"].get("msg_id") == ident
            if mine and message["msg_type"] == "execute_input":
                return

    def run(self, code: str) -> Shown:
        """Run a cell to its end."""
        return self.finish(self.start(code))

    def interrupt(self) -> None:
        """The Stop button."""
        self.manager.interrupt_kernel()

    def complete(self, code: str) -> list[str]:
        """The Tab key at the end of ``code``."""
        reply = self.client.complete(code, len(code), reply=True, timeout=PATIENCE_S)
        return list(reply["content"]["matches"])

    def resident_mib(self) -> float:
        """Memory that the notebook's own kernel holds."""
        return float(psutil.Process(self.manager.provisioner.pid).memory_info().rss) / 2**20

    def close(self) -> None:
        """End it."""
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def notebook(
    start_shared: Callable[[], rdmalab.Lab], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Notebook]:
    one = Notebook(start_shared().id, tmp_path_factory.mktemp("ipython"))
    yield one
    one.close()
    for host in start_shared().hosts:  # nobody else need hear of the deaths that were died here
        host.restart()


# ---------------------------------------------------------------- what a cell shows


def test_a_cell_behaves_like_a_local_one(notebook: Notebook) -> None:
    """Output, the value of the last line, and a variable brought into the notebook."""
    shown = notebook.run(
        "%%on alice -o x -o name\nprint('hello')\nx = [1, 2]\nname = here.name\nx".replace(
            "x = [1", "from rdmalab import here\nx = [1"
        )
    )
    assert shown.error is None and shown.stderr == ""
    assert shown.stdout == "hello\n"
    assert [d["text/plain"] for d in shown.displays] == ["[1, 2]"]
    assert notebook.run("print(x, name)").stdout == "[1, 2] alice\n"


def test_rich_displays_pass_through_as_they_are(notebook: Notebook) -> None:
    shown = notebook.run("""%%on alice
from IPython.display import HTML, Image, SVG, display, clear_output, update_display
import base64
png = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwAD"
                       "hgGAWjR9awAAAABJRU5ErkJggg==")
display(HTML("<b>bold</b>"), Image(data=png), SVG("<svg xmlns='http://www.w3.org/2000/svg'/>"))
handle = display(HTML("<i>1</i>"), display_id="mine")
handle.update(HTML("<i>2</i>"))
clear_output(wait=True)
class Both:
    def _repr_mimebundle_(self, **kwargs):
        return {"text/plain": "both", "application/json": {"a": [1]}}
Both()
""")
    assert shown.error is None, shown.error
    html, image, svg, first, second, both = shown.displays
    assert html["text/html"] == "<b>bold</b>" and "<svg" in svg["image/svg+xml"]
    assert image["image/png"].startswith("iVBORw0KGgo")
    assert (first["text/html"], second["text/html"]) == ("<i>1</i>", "<i>2</i>")
    assert both["application/json"] == {"a": [1]} and shown.cleared == 1


def test_a_hosts_stderr_is_marked_and_shown_on_stdout(notebook: Notebook) -> None:
    """Any stderr text in a graded cell costs marks, so there is none; the mark says whose it is."""
    shown = notebook.run("""%%on alice
import sys, os, subprocess, warnings
print("out")
print("aside", file=sys.stderr)
print("out again"); sys.stdout.flush()
os.write(2, b"from C\\n")
subprocess.run("echo child >&2", shell=True)
""")
    assert shown.error is None and shown.stderr == ""
    assert "[alice stderr] aside\n" in shown.stdout and "out again\n" in shown.stdout
    assert re.search(r"\[alice stderr\] (.*\n)?from C\n", shown.stdout)
    assert "child\n" in shown.stdout


def test_an_error_looks_like_a_local_one(notebook: Notebook) -> None:
    """Its class's name is that of the host's, its lines are the host's, and nothing of ours."""
    shown = notebook.run("%%on bob\ndef half(n):\n    return n / 0\nhalf(3)")
    assert shown.error is not None and shown.stderr == ""
    assert shown.error["ename"] == "ZeroDivisionError"
    assert shown.error["evalue"] == "[bob] ZeroDivisionError: division by zero"
    lines = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(shown.error["traceback"]))
    assert lines.startswith("[bob] raised ZeroDivisionError")
    assert "return n / 0" in lines and "rdmalab/kernels.py" not in lines
    caught = notebook.run("""
import rdmalab
try:
    get_ipython().run_cell_magic("on", "bob", "{}['missing']")
except rdmalab.RemoteError as error:
    print(error.ename, error.host)
""")
    assert caught.stdout == "KeyError bob\n"


WRONG_LINES = {
    "": "needs a host's name",
    "mallory": "no host 'mallory'; it has alice, bob",
    "alice --timeout": "lacks its value",
    "alice --timeout soon": "lacks its value",
    "alice --colour": "no option --colour",
    "alice bob -o x": "-o brings a variable of one host",
    "'alice": "lacks its value|quotation",
}


@pytest.mark.parametrize("line", WRONG_LINES)
def test_a_wrong_line_is_one_sentence_with_the_right_one(notebook: Notebook, line: str) -> None:
    shown = notebook.run(f"%%on {line}\npass")
    assert shown.error is not None and shown.error["ename"] == "UsageError"
    assert re.search(WRONG_LINES[line], shown.error["evalue"]), shown.error["evalue"]
    assert len(shown.error["traceback"]) == 1


def test_two_hosts_in_one_cell_keep_their_outputs_apart(notebook: Notebook) -> None:
    shown = notebook.run("""%%on alice bob
import socket
for i in range(3):
    print(socket.gethostname(), i)
""")
    assert shown.error is None
    blocks = re.split(r"── (\w+) ─+\n", shown.stdout)
    assert blocks[1::2] == ["alice", "bob"]
    for name, text in zip(blocks[1::2], blocks[2::2], strict=True):
        assert text == "".join(f"{name} {i}\n" for i in range(3))


def test_one_of_two_hosts_fails(notebook: Notebook) -> None:
    """The other's output is there, and the error names its host."""
    shown = notebook.run("""%%on alice bob
import socket
if socket.gethostname() == "alice":
    raise ValueError("only here")
print("well")
""")
    assert shown.error is not None and shown.error["evalue"] == "[alice] ValueError: only here"
    assert shown.stdout.rstrip().endswith("well")
    both = notebook.run("%%on alice bob\n1 / 0")
    assert both.error is not None and both.error["evalue"].startswith("[alice] ZeroDivision")
    assert "[bob] raised ZeroDivisionError" in both.stdout


# ---------------------------------------------------------------- beside the next cells


def test_a_background_job_replays_its_output_when_waited_for(notebook: Notebook) -> None:
    begun = notebook.run("%%on bob --bg\nimport time\nprint('one')\ntime.sleep(0.3)\nprint('two')")
    assert begun.error is None and begun.stdout == ""
    assert "<Job on bob: running>" in begun.displays[0]["text/plain"]
    assert notebook.run("%%on alice\nprint('meanwhile')").stdout == "meanwhile\n"
    waited = notebook.run("%wait bob")
    assert waited.error is None and waited.stdout == "one\ntwo\n"
    again = notebook.run("%wait bob")
    assert again.error is not None and "%%on bob --bg" in again.error["evalue"]


def test_a_background_jobs_error_comes_when_it_is_waited_for(notebook: Notebook) -> None:
    assert notebook.run("%%on bob --bg\nprint('so far'); 1 / 0").error is None
    waited = notebook.run("%wait bob")
    assert waited.stdout == "so far\n"
    assert waited.error is not None and waited.error["ename"] == "ZeroDivisionError"
    assert notebook.run("%%on bob\nprint('goes on')").stdout == "goes on\n"


def test_a_job_that_goes_on_can_be_waited_for_again(notebook: Notebook) -> None:
    notebook.run(
        "%%on bob --bg\nimport os, time\nwhile not os.path.exists('/tmp/go'): time.sleep(0.01)"
        "\nprint('went')"
    )
    early = notebook.run("%wait bob --timeout 0.5")
    assert early.error is not None and "still running" in early.error["evalue"]
    notebook.run(
        "import rdmalab; rdmalab.up().remote.run('exec', ['touch', '/tmp/go'], host='bob')"
    )
    assert notebook.run("%wait bob").stdout == "went\n"


def test_both_hosts_in_the_background(notebook: Notebook) -> None:
    notebook.run("%%on alice bob --bg\nimport socket; print(socket.gethostname())")
    assert notebook.run("%wait alice bob").stdout == "alice\nbob\n"


# ---------------------------------------------------------------- Stop, and too much


HOUR = "print('begun', flush=True)\nimport time; time.sleep(3600)"
STUBBORN = """print('begun', flush=True)
while True:
    try:
        while True: pass
    except KeyboardInterrupt: pass
"""
STOPPED = {
    "one host": f"%%on alice\n{HOUR}",
    "both hosts": f"%%on alice bob --timeout 3600\n{HOUR}",
    "waiting": "print('begun', flush=True)\n%wait bob --timeout 3600",
    "code that refuses to stop": f"%%on alice bob --timeout 3600\n{STUBBORN}",
}


@pytest.mark.parametrize("kind", STOPPED)
def test_the_stop_button_ends_a_cell_everywhere(
    notebook: Notebook, shared_lab: rdmalab.Lab, sh: Callable, kind: str
) -> None:
    """B56: KeyboardInterrupt in the notebook, the hosts idle, and their variables kept if they
    can be."""
    notebook.run("%%on alice bob\nkept = 9")
    if kind == "waiting":
        notebook.run("%%on bob --bg\nimport time; time.sleep(3600)")
    ident = notebook.start(STOPPED[kind])
    if " bob " in STOPPED[kind]:
        notebook.begun(ident)  # before that a kernel does not hear the button
        time.sleep(1)  # its output comes at the end; so a moment, and Stop whenever that is
    else:
        notebook.finish(ident, until=lambda shown: "begun" in shown.stdout)
    begin = time.monotonic()
    notebook.interrupt()
    shown = notebook.finish(ident)
    print(f"{kind}: stopped in {time.monotonic() - begin:.2f} s")
    assert shown.error is not None and shown.error["ename"] == "KeyboardInterrupt"
    if kind == "waiting":  # the job itself goes on
        notebook.run("import rdmalab; rdmalab.up().bob.interrupt()")
        assert notebook.run("%wait bob").error["ename"] == "KeyboardInterrupt"  # type: ignore[index]
    if kind != "code that refuses to stop":
        assert notebook.run("%%on alice bob\nprint(kept)").stdout.count("9") == 2
    assert notebook.run("%%on alice bob\nprint(1 + 1)").stdout.count("2") == 2


def test_a_flood_is_cut_and_its_log_is_complete(notebook: Notebook) -> None:
    """B55: 300,000 lines: first and last ones shown, all of them in a file that is named."""
    shown = notebook.run("""%%on alice
for start in range(0, 300_000, 100):
    print("\\n".join(f"line {i}" for i in range(start, start + 100)))
""")
    assert shown.error is None
    assert shown.size < SHOWN_MAX
    assert shown.stdout.startswith("line 0\nline 1\n")
    assert shown.stdout.endswith("line 299998\nline 299999\n")
    path = Path(re.search(r"all of it in (\S+\.log)", shown.stdout)[1])  # type: ignore[index]
    lines = path.read_text().splitlines()
    assert lines == [f"line {i}" for i in range(300_000)]
    assert path.stat().st_mode & 0o077 == 0 or path.parent.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("background", ["", "--bg"], ids=["in front", "in the background"])
def test_a_print_without_end_stays_within_bounds(notebook: Notebook, background: str) -> None:
    """Neither the notebook's file nor its kernel's memory grows with what a host prints."""
    notebook.run("%%on alice\nprint('warm', 'x' * 200_000)")
    before = notebook.resident_mib()
    endless = "line = 'x' * 10_000\nwhile True: print(line)"
    if background:
        notebook.run(f"%%on alice --bg --timeout 5\n{endless}")
        shown = notebook.run("%wait alice")
    else:
        shown = notebook.run(f"%%on alice --timeout 5\n{endless}")
    assert shown.error is not None and shown.error["ename"] == "HostTimeout"
    assert shown.size < SHOWN_MAX
    grown = notebook.resident_mib() - before
    cut = int(re.search(r"\.\.\. (\d+) characters more", shown.stdout)[1])  # type: ignore[index]
    print(f"{cut / 1e6:.0f} MB printed, the notebook's kernel has grown by {grown:.0f} MiB")
    assert cut > 1_000_000 and grown < 60
    assert notebook.run("%%on alice\nprint('well')").stdout == "well\n"


# ---------------------------------------------------------------- the rest of the contract


def test_completion_knows_the_hosts_names(notebook: Notebook) -> None:
    notebook.run(
        "%%on alice\nfirst_buffer = b''\nclass Endpoint:\n    queue_pair = 1\nnode = Endpoint()"
    )
    assert "first_buffer" in notebook.complete("%%on alice\nfirst_b")
    assert "first_buffer" not in notebook.complete("%%on bob\nfirst_b")
    assert any("queue_pair" in match for match in notebook.complete("%%on alice\nx = 1\nnode.qu"))
    assert "first_buffer" not in notebook.complete("first_b")


def test_completion_gives_up_while_the_host_is_busy(notebook: Notebook) -> None:
    """It does not wait for the cell that runs, and it is there again afterwards."""
    notebook.run("%%on alice --bg\nlate_buffer = 1\nimport time; time.sleep(3600)")
    assert "late_buffer" not in notebook.complete("%%on alice\nlate_b")
    assert (
        notebook.run("print(rdmalab.up().alice.kernel.lock.acquire(blocking=False))").stdout
        == "False\n"
    )
    notebook.run("rdmalab.up().alice.interrupt()")
    notebook.run("%wait alice")
    end = time.monotonic() + 30  # a busy machine may not answer within the second that it is given
    while "late_buffer" not in notebook.complete("%%on alice\nlate_b"):
        assert time.monotonic() < end


def test_the_extension_can_be_loaded_twice(notebook: Notebook) -> None:
    for line in ("%load_ext rdmalab", "%reload_ext rdmalab"):
        assert notebook.run(line).error is None
    assert notebook.run("%%on alice\nprint('once')").stdout == "once\n"
    matchers = "[m.__name__ for m in get_ipython().Completer.custom_matchers]"
    assert notebook.run(f"print({matchers}.count('complete_on_host'))").stdout == "1\n"


def test_the_table_of_hosts(notebook: Notebook, shared_lab: rdmalab.Lab) -> None:
    (shown,) = notebook.run("%hosts").displays
    for host in shared_lab.hosts:
        facts = (host.name, host.ip, host.device, f"{host.gid} ({host.gid_index})", "4096", "ready")
        assert re.search(r"\s+".join(map(re.escape, facts)), shown["text/plain"])
        assert (
            "".join(f'<td style="text-align:left">{fact}</td>' for fact in facts)
            in shown["text/html"]
        )


def test_a_dead_host_costs_one_sentence(notebook: Notebook) -> None:
    """B16, as the learner sees it."""
    shown = notebook.run("%%on bob\nimport os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert shown.error is not None and shown.error["ename"] == "HostDied"
    (line,) = shown.error["traceback"]
    assert line.startswith("HostDied: [bob] The kernel crashed (SIGSEGV)") and "\n" not in line
    assert notebook.run("%%on bob\nprint('again')").stdout == "again\n"
