"""What is told of a machine that ended: its reason if it gave one, and where all of it is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rdmalab import console

PANIC = """rdmalab-agent   11.00  kernels are parked
[    1.47] Oops: int3: 0000 [#1] SMP NOPTI
[    1.48] RIP: 0010:sched_clock_cpu+0x9/0x1f0
[    1.49] Call Trace:
[    1.50] RIP: 0010:sched_clock_cpu+0x9/0x1f0
[    1.51] Kernel panic - not syncing: Fatal exception in interrupt
"""
TRACE = 'rdmalab-agent 1\nTraceback (most recent call last):\n  File "x"\nOSError: full\nlater\n'


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RDMALAB_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def said(folder: Path, guest: str, qemu: str = "") -> console.Said:
    (folder / "qemu.log").write_text(f"qemu-system -machine q35\n{qemu}")
    (folder / "console.log").write_text(guest)
    return console.said_in(folder)


def test_a_panic_is_its_first_complaint_and_where_it_was(tmp_path: Path) -> None:
    found = said(tmp_path, PANIC)
    assert found.panicked
    lines = [line.strip() for line in found.shown().strip().splitlines()]
    assert lines == PANIC.splitlines()[1:3]


def test_a_traceback_is_shown_whole_and_nothing_behind_it(tmp_path: Path) -> None:
    found = said(tmp_path, TRACE)
    assert not found.panicked
    assert "OSError: full" in found.shown() and "later" not in found.shown()


def test_qemus_own_words_come_first_and_its_command_line_is_none_of_them(tmp_path: Path) -> None:
    found = said(tmp_path, "last line\n", "qemu: could not open disk\n")
    assert found.qemu == "qemu: could not open disk" and "-machine" not in found.shown()
    assert found.shown().split() == ["qemu:", "could", "not", "open", "disk", "last", "line"]


def test_nothing_was_said(tmp_path: Path) -> None:
    found = console.said_in(tmp_path / "gone")
    assert found == ("", "", "") and found.shown() == " "


def test_the_newest_logs_of_a_kind_are_kept(tmp_path: Path, cache: Path) -> None:
    found = said(tmp_path, PANIC)
    found.keep("start-1")
    for number in range(console.LOGS_KEPT + 3):
        sentence = found.keep(f"gone-lab-{number}")
        os.utime(cache / "logs" / f"gone-lab-{number}.log", (number, number))
    assert "Kernel panic" in Path(sentence.removeprefix("Its log is ")[:-1]).read_text()
    kept = {file.name for file in (cache / "logs").iterdir()}
    last = range(3, console.LOGS_KEPT + 3)
    assert kept == {"start-1.log", *(f"gone-lab-{number}.log" for number in last)}


def test_a_log_that_cannot_be_kept_is_said(tmp_path: Path, cache: Path) -> None:
    found = said(tmp_path, PANIC)
    cache.mkdir(exist_ok=True)
    (cache / "logs").write_text("a file")
    assert "could not be kept" in found.keep("gone-lab-1")
