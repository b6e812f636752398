"""B65: Ctrl-C, SIGTERM and SIGKILL at any moment of `up`; the next `up` just works."""

from __future__ import annotations

import itertools
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .sandbox import Command, Done, Sandbox, private_cache, sandbox

pytestmark = [pytest.mark.fabric, pytest.mark.long, pytest.mark.timeout(900)]

Moment = Callable[[Sandbox, Command], bool]
HOSTS = ("alice",)  # one host boots sooner than two, and the moments are the same


def folder(box: Sandbox, up: Command) -> bool:
    """The lab has a folder, and nothing in it yet or hardly anything."""
    return box.lab().exists()


def qemu(box: Sandbox, up: Command) -> bool:
    """QEMU has started."""
    return (box.lab() / "qmp.sock").exists()


def agent(box: Sandbox, up: Command) -> bool:
    """The guest's process 1 is at work."""
    console = box.lab() / "console.log"
    return console.exists() and b"rdmalab-agent" in console.read_bytes()


def hosts(box: Sandbox, up: Command) -> bool:
    """The hosts are half built."""
    console = box.lab() / "console.log"
    return console.exists() and b"rxe devices are up" in console.read_bytes()


def saving(box: Sandbox, up: Command) -> bool:
    """The hosts are built and are being saved."""
    return "saving this moment" in up.err()


def published(box: Sandbox, up: Command) -> bool:
    """The snapshot is there, and a lab is being made of it."""
    return any(box.cache.glob("snapshots/[!.]*/snapshot.json"))


def after(delay_s: float) -> Moment:
    """So long after the command began."""

    def reached(box: Sandbox, up: Command) -> bool:
        return time.monotonic() - up.begin >= delay_s

    reached.__name__ = f"{delay_s:.2f} s"
    return reached


COLD: list[Moment] = [folder, qemu, agent, hosts, published]
WARM: list[Moment] = [after(0.3), folder, qemu, after(0.8), after(1.2)]


@pytest.fixture
def box() -> Iterator[Sandbox]:
    """A sandbox with a cache that knows the image, and no saved start."""
    with private_cache() as cache, sandbox(cache) as made:
        yield made


def ended(box: Sandbox, moment: Moment, signum: int) -> Done:
    """An `up` that gets a signal at a moment."""
    up = box.start("up", *HOSTS)
    up.until(lambda: moment(box, up))
    return up.end(signum)


def stopped(box: Sandbox, moment: Moment, signum: int) -> None:
    """An `up` that is asked to stop at a moment does, and by itself leaves nothing behind."""
    done = ended(box, moment, signum)
    assert "Traceback" not in done.err, done.err
    if done.code == 0:  # it was done already
        box.works()
        assert box.run("down").code == 0
    elif (done.code, done.err) != (-signum, ""):  # on a busy machine: Python was not there yet
        assert (done.code, done.out) == (130, ""), done
        assert "interrupted" in done.err.splitlines()[-1], done.err
    assert box.left() == [], moment.__name__


def test_b65_ctrl_c_and_sigterm_at_five_moments_of_a_first_and_of_a_later_start(
    box: Sandbox,
) -> None:
    """B65: each `up` after a stopped one gets further than that; the last of them all the way."""
    signals = itertools.cycle([signal.SIGINT, signal.SIGTERM])
    for moment, signum in zip(COLD, signals, strict=False):
        stopped(box, moment, signum)
    box.up(*HOSTS)
    box.works()
    assert box.run("down").code == 0
    for moment, signum in zip(WARM, signals, strict=False):
        stopped(box, moment, signum)
        assert box.up(*HOSTS)["restored"]
        box.works()
        assert box.run("down").code == 0


def test_b65_killed_at_ten_moments(box: Sandbox) -> None:
    """B65: nobody cleans up then; the next start does, adopts or removes, and works."""
    random.seed(65)
    first = [*COLD[:-1], saving, published]
    moments = [*first, *(after(random.uniform(0.1, 1.5)) for _ in range(4))]
    for moment in moments:
        ended(box, moment, signal.SIGKILL)
        if moment is agent:
            guest_ends_by_itself(box)
        if moment in first[:-1]:
            continue  # a first start takes its time; the next killed one gets further than this
        again = box.up(*HOSTS)
        assert len(box.qemus()) == 1, again
        box.works()
    assert box.run("down").code == 0
    assert box.left() == []


def guest_ends_by_itself(box: Sandbox) -> None:
    """A guest whose controller was killed is built, finds nobody to talk to, and powers off."""
    deadline = time.monotonic() + 120
    while box.qemus():
        assert time.monotonic() < deadline, "the guest runs on without a controller"
        time.sleep(0.2)
    assert "the controller went away" in console(box.lab())
    assert "default: not running" in box.run("status").out


def console(lab: Path) -> str:
    return (lab / "console.log").read_text(errors="replace")
