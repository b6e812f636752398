"""``doctor --fix``: what it installs, how it asks for the right to, and how it fails.

apt-get and sudo are scripts in a folder that is all of PATH; "installing" makes a program appear.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from rdmalab.doctor import fix, installer, packages
from rdmalab.doctor.__main__ import main
from rdmalab.doctor.packages import Need
from rdmalab.errors import MachineError

NEEDS = (
    Need("run", "rl-qemu", "qemu-system-x86", "qemu-kvm", "", "qemu"),
    Need("build", "rl-mkfs", "erofs-utils", "erofs-utils", "erofs-utils", ""),
    Need("test", "rl-browser", "chromium"),
)

APT = """
printf '%s\\n' "$*" >> "$HERE/calls"
[ -e "$HERE/fails" ] && { echo 'Reading lists'; echo 'E: Unable to fetch some archives'; exit 100; }
case "$*" in
  *update*) touch "$HERE/lists/x_Packages" ;;
  *install*)
    [ -e "$HERE/stale" ] && [ ! -e "$HERE/lists/x_Packages" ] && { echo 'E: 404'; exit 100; }
    [ -e "$HERE/forgets" ] && exit 0
    for name in rl-qemu rl-mkfs rl-browser; do
      printf '#!/bin/sh\\n' > "$HERE/bin/$name"; chmod 755 "$HERE/bin/$name"
    done ;;
esac
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with apt-get, without sudo, on which three things are missing; we are root."""
    for name in ("bin", "lists"):
        (tmp_path / name).mkdir()
    program(tmp_path, "apt-get", APT)
    (tmp_path / "bin/env").symlink_to("/usr/bin/env")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(packages, "NEEDS", NEEDS)
    monkeypatch.setattr(installer, "LISTS", tmp_path / "lists")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return tmp_path


def program(here: Path, name: str, body: str) -> None:
    path = here / "bin" / name
    path.write_text(f"#!/bin/sh\nPATH={here}/bin:/usr/bin:/bin\nHERE={here}\n{body}\n")
    path.chmod(0o755)


def user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)


def calls(here: Path) -> list[str]:
    """What apt-get was asked, without its options."""
    path = here / "calls"
    lines = path.read_text().splitlines() if path.exists() else []
    return [re.sub(r"(^| )(-o \S+|--?\S+)(?= )", "", line).strip() for line in lines]


def is_one_sentence(error: pytest.ExceptionInfo[MachineError]) -> bool:
    return "\n" not in str(error.value) and str(error.value).endswith(".")


def test_what_is_missing_is_said_and_installed(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fix() == ["qemu-system-x86", "erofs-utils"]
    assert calls(here) == ["update", "install qemu-system-x86 erofs-utils"]
    said = capsys.readouterr()
    assert said.err == "rdmalab: installing as root: qemu-system-x86 erofs-utils\n"
    assert said.out == "", "stdout belongs to the answer"


def test_apt_get_is_told_not_to_ask_and_not_to_recommend(here: Path) -> None:
    fix()
    install = (here / "calls").read_text().splitlines()[-1]
    assert "--no-install-recommends" in install and " -y " in f" {install} "
    assert "DEBIAN_FRONTEND=noninteractive" in packages.install_command("apt-get", [])


def test_the_second_time_nothing_is_done(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fix()
    before = calls(here)
    capsys.readouterr()
    assert fix() == [] and calls(here) == before
    assert capsys.readouterr().err == ""


def test_what_the_tests_need_only_on_request(here: Path) -> None:
    assert fix(test=True) == ["qemu-system-x86", "erofs-utils", "chromium"]


def test_fresh_lists_are_not_fetched_again(here: Path) -> None:
    (here / "lists/x_Packages").touch()
    fix()
    assert calls(here) == ["install qemu-system-x86 erofs-utils"]


def test_old_lists_are_fetched_first(here: Path) -> None:
    """The folder's date counts: the files in it carry the archive's."""
    week_ago = time.time() - 7 * 24 * 3600
    (here / "lists/x_Packages").touch()
    os.utime(here / "lists", (week_ago, week_ago))
    fix()
    assert calls(here)[0] == "update"


def test_lists_that_lead_nowhere_are_fetched_and_tried_again(here: Path) -> None:
    """The lists look fresh, yet the archive has moved on: 404."""
    (here / "lists/y_Packages").touch()
    (here / "stale").touch()
    assert fix() == ["qemu-system-x86", "erofs-utils"]
    assert calls(here) == [
        "install qemu-system-x86 erofs-utils",
        "update",
        "install qemu-system-x86 erofs-utils",
    ]


def test_a_user_without_sudo_gets_one_sentence_for_the_administrator(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user(monkeypatch)
    with pytest.raises(MachineError) as error:
        fix()
    assert is_one_sentence(error)
    assert "administrator" in str(error.value) and "there is no sudo" in str(error.value)
    assert "apt-get install --no-install-recommends qemu-system-x86 erofs-utils" in str(error.value)
    assert calls(here) == []


def test_a_user_with_sudo_that_asks_nothing(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program(here, "sudo", 'printf "%s\\n" "$*" >> "$HERE/sudo"; [ "$1" = -n ] && shift; exec "$@"')
    user(monkeypatch)
    fix()
    assert capsys.readouterr().err.startswith("rdmalab: installing through sudo: ")
    assert all("apt-get" in line for line in (here / "sudo").read_text().splitlines()[1:])
    assert calls(here)[-1].startswith("install")


def test_sudo_that_wants_a_password_where_nobody_can_type_one(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(here, "sudo", "exit 1")
    user(monkeypatch)
    with open(os.devnull, encoding="utf-8") as nobody:
        for stdin in (None, nobody):
            monkeypatch.setattr("sys.stdin", stdin)
            with pytest.raises(MachineError, match="cannot ask for your password") as error:
                fix()
            assert is_one_sentence(error)


def test_sudo_that_refuses_this_user(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(here, "sudo", "exit 1")
    user(monkeypatch)
    controller, terminal = os.openpty()
    with open(terminal, encoding="utf-8") as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        with pytest.raises(MachineError, match="sudo refused you") as error:
            fix()
    os.close(controller)
    assert is_one_sentence(error) and calls(here) == []


def test_apt_get_that_fails_is_one_sentence_with_its_reason(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "fails").touch()
    with pytest.raises(MachineError) as error:
        fix()
    assert is_one_sentence(error) and "network" in str(error.value)
    assert "E: Unable to fetch some archives" in str(error.value)
    assert main(["--fix", "--system"]) == 1
    said = capsys.readouterr()
    assert "Traceback" not in said.err and said.out == ""


def test_a_package_that_brings_nothing_is_noticed(here: Path) -> None:
    (here / "forgets").touch()
    with pytest.raises(MachineError, match="yet rl-qemu, rl-mkfs cannot be found"):
        fix()


@pytest.mark.parametrize(
    ("manager", "command"),
    [
        ("dnf", "dnf install -y qemu-kvm erofs-utils"),
        ("pacman", "pacman -S --needed erofs-utils"),
        ("brew", "brew install qemu"),
    ],
)
def test_other_systems_get_the_names_as_text(here: Path, manager: str, command: str) -> None:
    (here / "bin/apt-get").rename(here / "bin" / manager)
    with pytest.raises(MachineError) as error:
        fix()
    assert f"`{command}`" in str(error.value) and calls(here) == []


def test_a_system_without_any_known_package_manager(here: Path) -> None:
    (here / "bin/apt-get").unlink()
    with pytest.raises(MachineError) as error:
        fix()
    assert "rl-qemu, rl-mkfs" in str(error.value)
    assert "qemu-system-x86" in str(error.value), "Debian's names help anywhere"


def test_the_real_table_has_a_debian_package_for_everything() -> None:
    assert all(need.apt for need in packages.NEEDS)
    assert {need.kind for need in packages.NEEDS} == {"run", "setup", "build", "test"}
    assert len({need.probe for need in packages.NEEDS}) == len(packages.NEEDS)


def test_a_need_is_a_program_a_file_or_a_module(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert packages.present(str(tmp_path / "file"))
    assert not packages.present(str(tmp_path / "other"))
    assert packages.present("python:json") and not packages.present("python:no_such_module")
    assert packages.present("sh") and not packages.present("rl-no-such-program")
