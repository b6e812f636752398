"""Programs end when we do, see no environment of ours, and root is played by what works."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from rdmalab import leash


def collect(*command: str, deadline_s: float = 20.0) -> tuple[int, list[str]]:
    lines: list[str] = []
    return leash.run(command, lines.append, deadline_s), lines


def test_output_comes_line_by_line() -> None:
    code, lines = collect("sh", "-c", "echo one; printf 'two\\rthree' >&2; exit 3")
    assert (code, lines) == (3, ["one", "two", "three"])


def test_a_program_sees_nothing_of_the_callers_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setenv("LANG", "de_DE.UTF-8")
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
    _, lines = collect("env")
    names = {line.partition("=")[0] for line in lines}
    assert "PYTHONPATH" not in names and "LANG" not in names
    assert "https_proxy=http://proxy.example:3128" in lines and "LC_ALL=C.UTF-8" in lines
    (path,) = [line for line in lines if line.startswith("PATH=")]
    assert "/usr/sbin" in path, "an ordinary user's PATH may lack it"


def test_a_deadline_ends_the_whole_group(tmp_path: Path) -> None:
    script = f"sleep 600 & echo $! > {tmp_path}/pid; while :; do echo x; sleep 0.1; done"
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        collect("sh", "-c", script, deadline_s=1.0)
    assert time.monotonic() - start < 10
    assert gone(int((tmp_path / "pid").read_text()))


def test_a_silent_program_has_a_deadline_too() -> None:
    with pytest.raises(TimeoutError):
        collect("sleep", "600", deadline_s=0.5)


def test_a_program_that_left_its_pipe_to_a_daemon_has_ended() -> None:
    code, lines = collect("sh", "-c", "setsid sleep 5 & echo done")
    assert (code, lines) == (0, ["done"])


def test_a_supervised_program_leaves_no_daemon(tmp_path: Path) -> None:
    script = f"(setsid sh -c 'echo $$ > {tmp_path}/pid; exec sleep 600' &); sleep 0.5; exit 7"
    assert leash.run(["sh", "-c", script], print, 20.0, way=leash.FAKECHROOT) == 7
    assert gone(int((tmp_path / "pid").read_text()), deadline_s=0.5)


def test_a_supervised_program_that_does_not_exist() -> None:
    lines: list[str] = []
    assert leash.run(["no-such-program"], lines.append, 20.0, way=leash.FAKECHROOT) != 0
    assert "no-such-program" in "".join(lines)


def test_an_error_of_the_listener_ends_the_program(tmp_path: Path) -> None:
    def listener(line: str) -> None:
        raise RuntimeError(line)

    with pytest.raises(RuntimeError, match="^x$"):
        leash.run(["sh", "-c", f"echo $$ > {tmp_path}/pid; echo x; sleep 600"], listener, 20.0)
    assert gone(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize(
    ("way", "script"),
    [
        ("None", "echo $$ > pid; exec sleep 600"),
        ("leash.FAKECHROOT", "sleep 600 & echo $! > pid; sleep 600"),
        ("leash.FAKECHROOT", "setsid sh -c 'echo $$ > pid; exec sleep 600' & sleep 600"),
        ("leash.FAKECHROOT", "(setsid sh -c 'echo $$ > pid; exec sleep 600' &); sleep 600"),
    ],
    ids=["alone", "with a child", "with a session", "with a daemon"],
)
def test_a_program_ends_when_we_are_killed(tmp_path: Path, way: str, script: str) -> None:
    code = f"""
        import os
        from rdmalab import leash
        os.chdir({str(tmp_path)!r})
        leash.run(["sh", "-c", {script!r}], print, 600, way={way})
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": str(Path(leash.__file__).parent.parent)},
    ) as child:
        end = time.monotonic() + 10
        while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip()):
            assert time.monotonic() < end
            time.sleep(0.05)
        child.kill()
    assert gone(int((tmp_path / "pid").read_text()))


def gone(pid: int, deadline_s: float = 10.0) -> bool:
    """Has the process ended (or is it a zombie that its parent has yet to collect)?"""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize(
    ("uid", "works", "libc", "way"),
    [
        (0, {leash.ROOT}, "", leash.ROOT),
        (0, set(), "", leash.ROOT_AS_IT_IS),
        (1000, {leash.USER_NAMESPACE, leash.MMDEBSTRAP}, "", leash.USER_NAMESPACE),
        (1000, {leash.MMDEBSTRAP}, "", leash.MMDEBSTRAP),
        (1000, set(), "glibc 2.41", leash.FAKECHROOT),
        (1000, set(), "glibc 2.36", None),
    ],
)
def test_the_first_way_that_works_is_taken(
    uid: int,
    works: set[leash.Way],
    libc: str,
    way: leash.Way | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leash.os, "geteuid", lambda: uid)
    monkeypatch.setattr(leash.os, "confstr", lambda name: libc)
    monkeypatch.setattr(leash.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(leash, "_works", lambda tried: tried in works)
    assert leash.choose_way() == way


def test_only_a_way_with_a_mount_namespace_may_mount() -> None:
    ways = (leash.ROOT, leash.ROOT_AS_IT_IS, leash.USER_NAMESPACE, leash.MMDEBSTRAP)
    may = {way for way in (*ways, leash.FAKECHROOT) if way.may_mount}
    assert may == {leash.ROOT, leash.USER_NAMESPACE, leash.MMDEBSTRAP}
    assert "--mount" in leash.ROOT.prefix and "--mount" in leash.USER_NAMESPACE.prefix


def test_this_machine_offers_a_way() -> None:
    way = leash.choose_way()
    assert way is not None and way.mode in ("root", "unshare", "fakechroot")
