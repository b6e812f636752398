"""The archives of the initrd, as cpio(1) and ordinary files see them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from rdmalab.cpio import write_cpio

needs_cpio = pytest.mark.skipif(not shutil.which("cpio"), reason="needs cpio(1), the oracle here")


def cpio_lists(archive: bytes, *options: str) -> str:
    """What cpio(1) says of an archive, an implementation that we did not write."""
    done = subprocess.run(["cpio", *options], input=archive, capture_output=True, check=True)
    return done.stdout.decode()


@needs_cpio
def test_cpio_lists_what_was_written(tmp_path: Path) -> None:
    (tmp_path / "tool").write_bytes(b"\x7fELF" + bytes(1001))
    archive = write_cpio(
        {"/overlay/opt/a.py": b"print(1)\n", "init": b"#!/bin/sh\n", "bin/tool": tmp_path / "tool"},
        executable=["init", "/bin/tool"],
        folders=["proc"],
    )
    listed = [
        line.split() for line in cpio_lists(archive, "-itv", "--numeric-uid-gid").splitlines()
    ]
    assert {(words[-1], words[0], words[2], words[3]) for words in listed} == {
        ("bin", "drwxr-xr-x", "0", "0"),
        ("bin/tool", "-rwxr-xr-x", "0", "0"),
        ("init", "-rwxr-xr-x", "0", "0"),
        ("overlay", "drwxr-xr-x", "0", "0"),
        ("overlay/opt", "drwxr-xr-x", "0", "0"),
        ("overlay/opt/a.py", "-rw-r--r--", "0", "0"),
        ("proc", "drwxr-xr-x", "0", "0"),
    }
    sizes = {words[-1]: words[4] for words in listed}
    assert (sizes["bin/tool"], sizes["overlay/opt/a.py"]) == ("1005", "9")


@needs_cpio
def test_cpio_unpacks_the_same_bytes(tmp_path: Path) -> None:
    contents = {f"d/{n}": os.urandom(n) for n in (0, 1, 2, 3, 4, 5, 511, 512, 513, 100_000)}
    archive = write_cpio(contents)
    cpio_lists(archive, "-id", "-D", str(tmp_path))
    assert {name: (tmp_path / name).read_bytes() for name in contents} == contents


def test_cpio_is_the_same_whenever_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"2")
    first = write_cpio({"x/a": b"1", "x/b": tmp_path / "b"})
    os.utime(tmp_path / "b", (1, 1))
    assert first == write_cpio({"x/b": b"2", "/x/a": b"1"})
    assert len(first) % 4 == 0, "a second archive behind it would not be aligned"


@pytest.mark.parametrize("name", ["../x", "a/../../x", "", "/"])
def test_cpio_takes_no_name_that_leads_elsewhere(name: str) -> None:
    with pytest.raises(ValueError, match="no name for a file"):
        write_cpio({name: b""})
