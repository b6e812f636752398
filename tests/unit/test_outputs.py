"""A host's output on its way to the reader: nothing added, nothing lost, and never without end."""

from __future__ import annotations

import resource
import signal
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rdmalab import outputs
from rdmalab.outputs import Relay

settings.register_profile("patient", deadline=None)  # a loaded machine may take its time
settings.load_profile("patient")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, where long output goes."""
    monkeypatch.setenv("RDMALAB_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def stream(text: str, name: str = "stdout") -> dict[str, Any]:
    return {"msg_type": "stream", "content": {"name": name, "text": text}}


def shown(capsys: pytest.CaptureFixture[str]) -> str:
    """What is on stdout; nothing may be on stderr, which nbgrader takes for a failure."""
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def logs(cache: Path) -> list[Path]:
    return sorted((cache / "output").glob("*")) if (cache / "output").exists() else []


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(max_size=30), max_size=20))
def test_short_output_comes_as_it_is(
    capsys: pytest.CaptureFixture[str], cache: Path, pieces: list[str]
) -> None:
    capsys.readouterr()
    with Relay("alice") as relay:
        for piece in pieces:
            relay(stream(piece))
    assert shown(capsys) == "".join(pieces)
    assert logs(cache) == []


def test_a_title_stands_once_before_the_first_output(capsys: pytest.CaptureFixture[str]) -> None:
    with Relay("bob", title="bob says") as relay:
        relay(stream("one\n"))
        relay(stream("two\n"))
    assert shown(capsys) == "bob says\none\ntwo\n"


def test_a_title_without_output_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with Relay("bob", title="bob says"):
        pass
    assert shown(capsys) == ""


def test_stderr_is_shown_on_stdout_with_the_hosts_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Relay("alice") as relay:
        for text, name in (("one\n", "stdout"), ("two ", "stderr"), ("three\n", "stderr")):
            relay(stream(text, name))
        relay(stream("four\n"))
    assert shown(capsys) == "one\n[alice stderr] two three\nfour\n"


def test_a_result_is_its_text_where_there_is_no_notebook(
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = {"text/plain": "42", "text/html": "<b>42</b>"}
    with Relay("alice") as relay:
        relay({"msg_type": "execute_result", "content": {"data": data}})
        relay({"msg_type": "clear_output", "content": {}})
        relay({"msg_type": "comm_open", "content": {}})
    assert shown(capsys) == "42\n"


# ---------------------------------------------------------------- long output


@pytest.mark.parametrize("size", [1, 7, 1000, 1_000_000])
def test_long_output_is_cut_in_the_middle_and_kept(
    size: int, capsys: pytest.CaptureFixture[str], cache: Path
) -> None:
    """The first part, the last lines, and a file with all of it, for its owner only."""
    text = "".join(f"line {number}\n" for number in range(30_000))
    with Relay("alice") as relay:
        for start in range(0, len(text), size):
            relay(stream(text[start : start + size]))
    out = shown(capsys)
    (file,) = logs(cache)
    assert file.read_text() == text
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert out.startswith(text[: outputs.HEAD_CHARS])
    assert out.endswith("line 29998\nline 29999\n")
    left = len(text) - outputs.HEAD_CHARS
    assert f"... {left} characters more, all of it in {file}; the last lines:" in out
    assert len(out) < outputs.HEAD_CHARS + 2000


def test_an_endless_line_is_cut_too(capsys: pytest.CaptureFixture[str]) -> None:
    with Relay("alice") as relay:
        for _ in range(50):
            relay(stream("x" * 100_000))
    assert len(shown(capsys)) < outputs.HEAD_CHARS + 20_000


def test_the_file_does_not_grow_for_ever(
    capsys: pytest.CaptureFixture[str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outputs, "LOG_CHARS", 300_000)
    with Relay("alice") as relay:
        for number in range(100):
            relay(stream(f"{number:09}\n" * 1000))
    (file,) = logs(cache)
    assert file.stat().st_size == 300_000
    out = shown(capsys)
    assert "its first 300,000 characters in" in out and out.endswith("000000099\n")


def test_only_the_latest_files_are_kept(capsys: pytest.CaptureFixture[str], cache: Path) -> None:
    for number in range(outputs.LOGS_KEPT + 3):
        with Relay(f"host{number}") as relay:
            relay(stream("x" * (outputs.HEAD_CHARS + 1)))
    names = [file.name.rpartition("-")[2] for file in logs(cache)]
    assert sorted(names) == [f"host{number}.log" for number in range(3, outputs.LOGS_KEPT + 3)]


def test_b64_a_full_disk_stops_the_keeping_and_nothing_else(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """B64: the cell goes on, and its last lines are shown all the same."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, before[1]))
    try:
        with Relay("alice") as relay:
            for number in range(100):
                relay(stream(f"{number:09}\n" * 1000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    out = shown(capsys)
    assert "which could not be kept (File too large)" in out and out.endswith("000000099\n")


def test_b64_a_folder_that_cannot_be_made_likewise(
    capsys: pytest.CaptureFixture[str], cache: Path
) -> None:
    cache.mkdir(mode=0o700)
    (cache / "output").write_text("in the way")
    with Relay("alice") as relay:
        relay(stream("x" * (outputs.HEAD_CHARS + 1)))
    assert "which could not be kept" in shown(capsys)


def test_the_relay_may_be_closed_twice(capsys: pytest.CaptureFixture[str], cache: Path) -> None:
    with Relay("alice") as relay:
        relay(stream("x" * (outputs.HEAD_CHARS + 10)))
        relay.close()
    assert shown(capsys).count("characters more") == 1 and len(logs(cache)) == 1
