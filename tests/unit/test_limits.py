"""A control group's memory limit: refused with figures before, named as the cause after (B69)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rdmalab import limits
from rdmalab.errors import MachineError

MIB = 1 << 20
RAM_MIB = 640  # a guest with two hosts


def group(root: Path, files: dict[str, str], cgroup: str = "0::/\n") -> Path:
    """A machine with 8000 MiB free, and these files of a control group."""
    texts = {"proc/meminfo": "MemAvailable: 8192000 kB\n", "proc/self/cgroup": cgroup}
    texts |= {f"sys/fs/cgroup/{name}": text + "\n" for name, text in files.items()}
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_b69_too_small_a_limit_is_refused_with_figures(tmp_path: Path) -> None:
    files = {"memory.max": str(800 * MIB), "memory.current": str(500 * MIB)}
    with pytest.raises(MachineError) as caught:
        limits.check_room(RAM_MIB, group(tmp_path, files))
    for figure in ("700 MiB", "300 MiB are free", "800 MiB"):
        assert figure in caught.value.what


def test_a_limit_with_room_and_a_machine_without_one_are_not_refused(tmp_path: Path) -> None:
    files = {"memory.max": str(1024 * MIB), "memory.current": str(100 * MIB)}
    limits.check_room(RAM_MIB, group(tmp_path / "a", files))
    limits.check_room(16000, group(tmp_path / "b", {}))  # it can swap: the doctor warns


@pytest.mark.parametrize(
    ("cgroup", "files"),
    [
        ("0::/\n", {"memory.max": f"{800 * MIB}", "memory.events": "oom 3\noom_kill 2"}),
        (
            "5:memory:/docker/x\n",
            {
                "memory/memory.limit_in_bytes": f"{800 * MIB}",
                "memory/memory.oom_control": "under_oom 0\noom_kill 2",
            },
        ),
    ],
    ids=["v2", "v1"],
)
def test_b69_what_the_kernel_ended_is_told(
    tmp_path: Path, cgroup: str, files: dict[str, str]
) -> None:
    told = limits.kills(group(tmp_path, files, cgroup))
    assert "2 times" in told and "800 MiB" in told


def test_nothing_is_told_where_nothing_was_ended(tmp_path: Path) -> None:
    files = {"memory.max": f"{800 * MIB}", "memory.events": "oom 0\noom_kill 0"}
    assert limits.kills(group(tmp_path, files)) == ""


@pytest.mark.parametrize(
    ("cgroup", "files", "count"),
    [
        ("0::/\n", {"cpu.max": "max 100000"}, 64),
        ("0::/\n", {"cpu.max": "100000 100000"}, 1),
        ("0::/\n", {"cpu.max": "250000 100000"}, 2),
        ("0::/\n", {"cpu.max": "20000 100000"}, 1),
        ("0::/a/b\n", {"a/cpu.max": "300000 100000", "a/b/cpu.max": "max 100000"}, 3),
        (
            "3:cpu,cpuacct:/docker/x\n",
            {"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"},
            1,
        ),
        (
            "3:cpu,cpuacct:/docker/x\n",
            {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"},
            64,
        ),
    ],
)
def test_b69_no_more_processors_than_this_process_may_keep_busy(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cgroup: str,
    files: dict[str, str],
    count: int,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    assert limits.processors(group(tmp_path, files, cgroup)) == count


def test_b69_a_process_that_is_kept_to_one_processor_uses_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3}, raising=False)
    assert limits.processors(group(tmp_path, {})) == 1
