"""What the guest image is made of: pure functions, and the hook that chooses a mirror."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from rdmalab import recipe
from rdmalab.errors import ImageError


def test_lists_have_comments() -> None:
    assert recipe.names_in("# one\nb  # two\n\n  c\n") == ["b", "c"]


@pytest.mark.parametrize("name", recipe.GUEST_FILES)
def test_a_changed_recipe_has_another_id(name: str, tmp_path: Path) -> None:
    shutil.copytree(recipe.GUEST, tmp_path / "guest")
    same = recipe._recipe_id("amd64", tmp_path / "guest")
    assert same == recipe.recipe_id("amd64") and re.fullmatch("[0-9a-f]{16}", same)
    with open(tmp_path / "guest" / name, "a") as changed:
        changed.write("# a word\n")
    (tmp_path / "changed").symlink_to("guest")
    assert recipe._recipe_id("amd64", tmp_path / "changed") != same


def test_every_file_of_the_guest_is_in_its_recipe() -> None:
    """Else a change of it would not build a new image."""
    assert {path.name for path in recipe.GUEST.iterdir()} == set(recipe.GUEST_FILES)


def test_each_architecture_has_its_own_id() -> None:
    assert recipe.recipe_id("amd64") != recipe.recipe_id("arm64")
    assert recipe.debian_arch("x86_64") == "amd64" and recipe.debian_arch("aarch64") == "arm64"
    with pytest.raises(ImageError, match="riscv64.*amd64, arm64"):
        recipe.debian_arch("riscv64")


def test_the_command_line_of_mmdebstrap(tmp_path: Path) -> None:
    guest = tmp_path / "a b" / "guest"
    shutil.copytree(recipe.GUEST, guest)
    paths = (Path("/t/root.tar"), guest)
    line = recipe.mmdebstrap_command(*paths, "arm64", "root", may_mount=True)
    assert line[:5] == [
        "mmdebstrap",
        "--mode=root",
        "--variant=essential",
        "--format=tar",
        "--verbose",
    ]
    assert line[-2:] == ["trixie", "/t/root.tar"], "no mirror: mmdebstrap's default"
    assert "--architectures=arm64" in line
    assert "--dpkgopt=path-exclude=/usr/share/man/*" in line
    assert "--dpkgopt=path-include=/usr/share/doc/rdma-core/tests/*" in line
    assert f"--setup-hook=sh '{guest}/hook-setup.sh' \"$1\"" in line
    assert [word for word in line if word.startswith("--skip")] == ["--skip=chroot/mount/sys"]
    line = recipe.mmdebstrap_command(*paths, "arm64", "root", may_mount=False)
    assert [word for word in line if word.startswith("--skip")] == ["--skip=chroot/mount"]
    (packages,) = [word for word in line if word.startswith("--include=")]
    assert {"rdma-core", "python3-pyverbs", "python3-ipykernel", "perftest"} <= set(
        packages.removeprefix("--include=").split(",")
    )


def test_the_recipe_names_no_mirror() -> None:
    files = [recipe.GUEST / name for name in recipe.GUEST_FILES]
    text = "".join(path.read_text() for path in [*files, Path(recipe.__file__)])
    assert "debian.org" not in text


@pytest.mark.parametrize("name", [n for n in recipe.GUEST_FILES if not n.endswith(".txt")])
def test_the_scripts_are_shell(name: str) -> None:
    subprocess.run(["sh", "-n", recipe.GUEST / name], check=True)


def test_modules_of_the_initrd_come_in_the_order_of_loading() -> None:
    text = "k/c-d.ko: k/b.ko k/a.ko\nk/a.ko:\nk/b.ko: k/a.ko\nk/e.ko: k/b.ko k/a.ko\nk/x.ko:\n"
    assert recipe.initrd_modules(text, ["c_d", "e"]) == ["k/a.ko", "k/b.ko", "k/c-d.ko", "k/e.ko"]
    with pytest.raises(ImageError, match="no module erofs"):
        recipe.initrd_modules(text, ["erofs"])


ONE_LINE = """
# deb http://commented.example/debian trixie main
deb cdrom:[Debian 13]/ trixie main
deb [arch=amd64 signed-by=/k.gpg] https://other.example/apt stable-of-others main
deb-src http://sources.example/debian bookworm main
deb [signed-by=/k.gpg] http://mirror.example/debian bookworm contrib main
deb http://security.example/debian-security bookworm-security main
"""
DEB822 = """
Types: deb
URIs: http://disabled.example/debian
Suites: bookworm
Components: main
Enabled: no

# a comment
Types: deb deb-src
URIs: file:/srv/debian
 http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://security.example/debian-security
Suites: bookworm-security
Components: main
"""
UBUNTU = "deb http://archive.example/ubuntu noble main universe\n"
FOUND = recipe.Mirror("http://mirror.example/debian", "http://security.example/debian-security")


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        ([ONE_LINE], FOUND),
        ([UBUNTU, DEB822], FOUND),
        ([UBUNTU], recipe.Mirror()),
        (["deb http://s.example/debian-security trixie-security main\n"], recipe.Mirror()),
        ([], recipe.Mirror()),
    ],
)
def test_the_machines_own_mirror_is_found(texts: list[str], found: recipe.Mirror) -> None:
    assert recipe.mirror_in(texts) == found


def run_setup_hook(root: Path, mirror: recipe.Mirror, mode: str = "root") -> str:
    """The sources that apt will see; starts from what mmdebstrap writes."""
    (root / "etc/apt/sources.list.d").mkdir(parents=True)
    (root / "etc/apt/sources.list").write_text(
        'deb [signed-by="/k.gpg"] http://default.example/debian trixie main\n'
        'deb [signed-by="/k.gpg"] http://default.example/debian trixie-updates main\n'
        'deb [signed-by="/k.gpg"] http://default.example/debian-security trixie-security main\n'
    )
    variables = recipe.hook_environment(recipe.GUEST, "amd64", mirror)
    return subprocess.run(
        ["sh", recipe.GUEST / "hook-setup.sh", root],
        env={**os.environ, **variables, "MMDEBSTRAP_MODE": mode},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.replace('[signed-by="/k.gpg"] ', "")


def test_the_kernel_comes_from_backports(tmp_path: Path) -> None:
    assert run_setup_hook(tmp_path, recipe.Mirror()) == (
        "deb http://default.example/debian trixie main\n"
        "deb http://default.example/debian trixie-updates main\n"
        "deb http://default.example/debian-security trixie-security main\n"
        "deb http://default.example/debian trixie-backports main\n"
    )


def test_another_mirror_replaces_the_default(tmp_path: Path) -> None:
    assert run_setup_hook(
        tmp_path, recipe.Mirror("https://m.example/d", "https://s.example/s")
    ) == (
        "deb https://m.example/d trixie main\n"
        "deb https://m.example/d trixie-updates main\n"
        "deb https://s.example/s trixie-security main\n"
        "deb https://m.example/d trixie-backports main\n"
    )


def test_a_mirror_without_security_is_used_alone(tmp_path: Path) -> None:
    sources = run_setup_hook(tmp_path, recipe.Mirror("http://m.example/debian"), "fakechroot")
    assert "default.example" not in sources and "security" not in sources


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        ("tar: root.tar: Wrote only 4096 of 10240 bytes: No space left on device", "disk is full"),
        ("Err:1 x\n  Temporary failure resolving 'm'\nE: Failed to fetch http://m", "be reached"),
        ("GPG error: NO_PUBKEY 6ED0\nE: Failed to fetch x", "key of Debian trixie"),
        ("E: Unable to locate package rdma-core", "mirror lacks"),
        ("unshare: write failed /proc/self/uid_map: Operation not permitted", "user namespaces"),
        ("sh: 1: xz: command not found", "program is missing"),
        ("I: fine\nE: rdmalab: the kernel 9 has no module siw\nW: x", "has no module siw"),
        ("I: nothing to see", "does not tell"),
    ],
)
def test_a_log_tells_the_cause(log: str, cause: str) -> None:
    found, next_step = recipe.likely_cause(log)
    assert cause in found and next_step.endswith((".", "--fix"))
