"""QEMU's command lines, which QEMU is taken, and whether KVM is believed."""

from __future__ import annotations

import json
import os
import platform
import shlex
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmalab import qemu
from rdmalab.errors import MachineError, UsageError
from rdmalab.image import GuestImage
from rdmalab.qemu import Accel, Machine, Qemu

settings.register_profile("patient", deadline=None)  # a loaded machine may take its time
settings.load_profile("patient")

QEMU = Qemu("/usr/bin/qemu", (7, 2), "QEMU emulator version 7.2.0")
IMAGE = GuestImage("abc", "amd64", Path("/cache/images/abc"))

FIRST_BOOT = """
/usr/bin/qemu -machine pc-q35-7.2,memory-backend=ram -accel tcg,thread=multi,tb-size=128
-cpu Nehalem-v1 -smp 2 -nodefaults -no-user-config -no-reboot -display none -m 640M
-object memory-backend-file,id=ram,size=640M,mem-path=/cache/ram,share=on
-kernel /cache/images/abc/kernel -initrd /cache/initrd
-append KERNEL_LINE
-drive file=/cache/images/abc/root.erofs,if=none,id=root,format=raw,readonly=on
-device virtio-blk-pci,drive=root
-netdev user,id=net,restrict=on,hostfwd=tcp:127.0.0.1:0-:7000,hostfwd=tcp:127.0.0.1:0-:7100
-device virtio-net-pci,netdev=net,romfile=
-chardev socket,id=boot,path=/run/lab/boot.sock -device virtio-serial-pci
-device virtserialport,chardev=boot,name=org.rdmalab.boot -device vmgenid,guid=auto
-serial file:/run/lab/console.log -qmp unix:/run/lab/qmp.sock,server=on,wait=off
"""


@pytest.fixture(autouse=True)
def amd64(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine of a known kind, with a cache of its own and no wishes."""
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setenv("RDMALAB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("RDMALAB_ACCEL", raising=False)
    monkeypatch.delenv("RDMALAB_QEMU", raising=False)
    qemu.find_qemu.cache_clear()


def line(accel: str = "tcg", *, restore: bool = False, folder: str = "/run/lab") -> list[str]:
    machine = Machine(QEMU, Accel(accel, ""), 2, 640, (7000, 7100))
    initrd, ram = Path("/cache/initrd"), Path("/cache/ram")
    return qemu.command(machine, IMAGE, Path(folder), initrd, ram, restore=restore)


def program(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


# ---------------------------------------------------------------- command lines


def test_the_line_of_a_first_boot() -> None:
    words = line()
    place = words.index("-append") + 1
    kernel_line, words[place] = words[place].split(), "KERNEL_LINE"
    assert words == shlex.split(FIRST_BOOT)
    assert kernel_line[0] == "console=ttyS0"
    assert "panic=-1" in kernel_line, "with -no-reboot, a kernel that panics ends QEMU at once"
    assert "maxcpus=1" in kernel_line, "while the kernel patches its own code nobody else runs it"


def test_a_restore_maps_the_memory_privately_and_waits_for_the_state() -> None:
    """Everything else is the same: the saved devices must meet the ones they were saved from."""
    restored = line(restore=True)
    assert restored[-2:] == ["-incoming", "defer"]
    assert [w.replace("share=off", "share=on") for w in restored[:-2]] == line()


def test_the_guest_has_no_way_out_and_nobody_a_way_in_but_this_machine() -> None:
    net = line()[line().index("-netdev") + 1].split(",")
    assert "restrict=on" in net
    assert all(word.startswith("hostfwd=tcp:127.0.0.1:0-:") for word in net if "fwd" in word)


def test_kvm_changes_the_accelerator_only() -> None:
    with_kvm, emulated = line("kvm"), line("tcg")
    assert [(a, b) for a, b in zip(with_kvm, emulated, strict=True) if a != b] == [
        ("kvm", f"tcg,thread=multi,tb-size={qemu.TB_SIZE_MIB}")
    ]


def test_the_line_for_arm64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    words = line()
    assert words[words.index("-machine") + 1].startswith("virt-7.2,")
    assert words[words.index("-cpu") + 1] == "cortex-a72"
    assert "console=ttyAMA0" in words[words.index("-append") + 1]
    assert not any("vmgenid" in word for word in words), "QEMU has it for PCs only"


@given(st.text(alphabet="ab,= '\"", min_size=1, max_size=12).filter(lambda t: t.strip()))
def test_a_folders_name_never_becomes_an_option(name: str) -> None:
    """QEMU splits options at single commas; a doubled one stands for itself."""
    words = line(folder=f"/run/{name}")
    for option in (w for w in words if "boot.sock" in w or "qmp.sock" in w):
        path = option.replace(",,", "\0")
        named = [p for p in path.split(",") if "/run/" in p]
        assert len(named) == 1 and f"/run/{name}/" in named[0].replace("\0", ",")


def test_another_architecture_has_no_guest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(MachineError, match="riscv64"):
        qemu.debian_arch()


def test_a_snapshot_depends_on_all_that_the_machine_is() -> None:
    base = Machine(QEMU, Accel("tcg", "x"), 2, 640, (7000,))
    others = [
        Machine(Qemu("/usr/bin/qemu", (8, 0), "QEMU 8"), Accel("tcg", "x"), 2, 640, (7000,)),
        Machine(QEMU, Accel("kvm", "x"), 2, 640, (7000,)),
        Machine(QEMU, Accel("tcg", "x"), 1, 640, (7000,)),
        Machine(QEMU, Accel("tcg", "x"), 2, 800, (7000,)),
        Machine(QEMU, Accel("tcg", "x"), 2, 640, (7000, 7100)),
    ]
    assert len({m.describe() for m in [base, *others]}) == 6
    assert Machine(QEMU, Accel("tcg", "y"), 2, 640, (7000,)).describe() == base.describe()


# ---------------------------------------------------------------- which QEMU


def test_the_named_program_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = program(tmp_path / "my-qemu", "echo 'QEMU emulator version 10.0.2 (Debian)'; echo more")
    monkeypatch.setenv("RDMALAB_QEMU", path)
    found = qemu.find_qemu()
    assert found == Qemu(path, (10, 0), "QEMU emulator version 10.0.2 (Debian)")


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("echo 'QEMU emulator version 7.1.9'", "is version 7.1; rdmalab needs 7.2"),
        ("echo 'QEMU emulator version 6.2.0'", "is version 6.2; rdmalab needs 7.2"),
        ("echo hello", "does not tell its version"),
        ("exit 3", "does not tell its version"),
    ],
)
def test_programs_that_will_not_do(tmp_path: Path, body: str, why: str) -> None:
    with pytest.raises(MachineError, match=why):
        qemu.find_qemu(program(tmp_path / "qemu", body))


def test_no_qemu_at_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MachineError, match="is not installed") as caught:
        qemu.find_qemu()
    assert "rdmalab doctor --fix" in caught.value.next_step


def test_a_file_that_is_no_program(tmp_path: Path) -> None:
    (tmp_path / "qemu").write_bytes(b"\0\1\2")
    (tmp_path / "qemu").chmod(0o755)
    with pytest.raises(MachineError, match="does not run"):
        qemu.find_qemu(str(tmp_path / "qemu"))


# ---------------------------------------------------------------- KVM (B59)


@pytest.fixture
def kvm_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A /dev/kvm that exists and opens; what it is worth, the trial boot says."""
    monkeypatch.setattr(os.path, "exists", lambda path: path == "/dev/kvm")
    monkeypatch.setattr(os, "access", lambda path, mode: True)


def guest_of(tmp_path: Path, body: str) -> Qemu:
    return Qemu(program(tmp_path / "qemu", body), (7, 2), "QEMU emulator version 7.2.0")


@pytest.mark.parametrize("name", ["tcg", "kvm"])
def test_b59_the_users_word_is_taken_without_a_trial(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RDMALAB_ACCEL", name)
    assert qemu.choose_accel(IMAGE, QEMU) == Accel(name, f"RDMALAB_ACCEL={name}")


@pytest.mark.parametrize("wrong", ["KVM", "hvf", "1"])
def test_b59_a_wrong_word_is_a_usage_error(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RDMALAB_ACCEL", wrong)
    with pytest.raises(UsageError, match="it can be tcg or kvm"):
        qemu.choose_accel(IMAGE, QEMU)


def test_b59_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "exists", lambda path: False)
    assert qemu.choose_accel(IMAGE, QEMU) == Accel("tcg", "this machine has no /dev/kvm")


def test_b59_a_device_of_others_names_the_group(
    kvm_there: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B59: the advice is the group kvm, never chmod."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    verdict = qemu.choose_accel(IMAGE, QEMU)
    assert verdict.name == "tcg" and "group kvm" in verdict.why and "chmod" not in verdict.why


def test_b59_kvm_that_works_is_believed_and_remembered(kvm_there: None, tmp_path: Path) -> None:
    tried = guest_of(tmp_path, f"echo boot; echo {qemu.PROBE_WORD}; echo x >> {tmp_path}/tries")
    first = qemu.choose_accel(IMAGE, tried)
    assert first.name == "kvm"
    assert qemu.choose_accel(IMAGE, tried) == first
    assert (tmp_path / "tries").read_text() == "x\n"


def test_b59_kvm_that_hangs_is_given_up_and_ended(
    kvm_there: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B59: and remembered, so that only the first start waits for it."""
    monkeypatch.setattr(qemu, "KVM_TRIAL_S", 0.5)
    hangs = guest_of(tmp_path, f"echo $$ > {tmp_path}/pid; exec sleep 300")
    verdict = qemu.choose_accel(IMAGE, hangs)
    assert verdict.name == "tcg" and "did not come up" in verdict.why
    pid = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    begin = time.monotonic()
    assert qemu.choose_accel(IMAGE, hangs) == verdict
    assert time.monotonic() - begin < 0.5


def test_b59_kvm_that_aborts_gives_its_last_words(kvm_there: None, tmp_path: Path) -> None:
    aborts = guest_of(tmp_path, "echo 'ioctl(KVM_CREATE_VM) failed: 22' >&2; kill -ABRT $$")
    verdict = qemu.choose_accel(IMAGE, aborts)
    assert verdict.name == "tcg"
    assert "ended with -6" in verdict.why and "KVM_CREATE_VM" in verdict.why


def test_b59_another_qemu_is_another_trial(kvm_there: None, tmp_path: Path) -> None:
    works = guest_of(tmp_path, f"echo {qemu.PROBE_WORD}")
    assert qemu.choose_accel(IMAGE, works).name == "kvm"
    newer = Qemu(program(tmp_path / "newer", "exit 1"), (8, 0), "QEMU emulator version 8.0.0")
    assert qemu.choose_accel(IMAGE, newer).name == "tcg"


@pytest.mark.parametrize("junk", [b"", b"{", b"[]", b"{}", b"\xff", b"null", b'"kvm"'])
def test_a_verdict_that_cannot_be_read_is_made_again(
    junk: bytes, kvm_there: None, tmp_path: Path
) -> None:
    works = guest_of(tmp_path, f"echo {qemu.PROBE_WORD}")
    qemu.choose_accel(IMAGE, works)
    (memo,) = (tmp_path / "cache" / "kvm").iterdir()
    memo.write_bytes(junk)
    assert qemu.choose_accel(IMAGE, works).name == "kvm"
    assert json.loads(memo.read_text())["name"] == "kvm"


def test_b64_a_verdict_that_cannot_be_kept_is_a_verdict_all_the_same(
    kvm_there: None, tmp_path: Path
) -> None:
    """B64: as on a full disk."""
    (tmp_path / "cache").mkdir(mode=0o700)
    (tmp_path / "cache" / "kvm").write_text("in the way")
    works = guest_of(tmp_path, f"echo {qemu.PROBE_WORD}")
    assert qemu.choose_accel(IMAGE, works).name == "kvm"
