"""The performance promises, measured: each figure beside its reference, in one run.

    make bench              everything (a few minutes; the guest image is built once more)
    python bench/promises.py --skip-build

Where a promise is a ratio, both sides are measured in turn (ours, bare, ours, bare ...) and medians
are compared. Absolute limits were given for a quiet machine with two processors and no KVM.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from rdmalab import Lab

RUNS = 5
CELLS = 60


@dataclass
class Promise:
    """One row: what was measured, beside what, and the limit (of the ratio, or of the value)."""

    name: str
    ours: float
    reference: float | None
    limit: float
    unit: str

    @property
    def ratio(self) -> float | None:
        """Ours to the reference's."""
        return None if self.reference is None else self.ours / self.reference

    @property
    def kept(self) -> bool:
        """Whether the promise is."""
        return (self.ours if self.ratio is None else self.ratio) <= self.limit


def timed(action: Callable[[], object]) -> float:
    """Seconds that an action takes."""
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def rdmalab(*words: str) -> None:
    """Run our command as a whole process, quietly."""
    subprocess.run(
        [sys.executable, "-m", "rdmalab", *words], check=True, capture_output=True, timeout=600
    )


def bare_restore() -> float:
    """Seconds from starting QEMU until both kernels answer, with nothing of our command around it.

    The same snapshot, the same command line; QEMU's own monitor protocol over a plain socket.
    """
    from rdmalab import microvm, overlay, qemu, qmp, snapshot, topology

    hosts = topology.plan(topology.DEFAULT_HOSTS)
    image = microvm.ensure_image(print)
    machine = microvm.plan_machine(image, hosts)
    files = overlay.files(hosts)
    key = microvm.snapshot_key(image, machine, files)
    saved, _ = snapshot.find(key, machine.qemu.banner)
    assert saved is not None, "rdmalab up has not saved a snapshot"
    folder = microvm.fresh_folder("bare")
    line = qemu.command(machine, image, folder, image.initrd, saved.ram, restore=True)
    thaw = microvm.thaw_order("bare", machine, hosts)
    begin = time.perf_counter()
    try:
        with microvm.launched(folder, line) as boot, qmp.monitor(folder / "qmp.sock") as monitor:
            qmp.migrate_in(monitor, saved.state)
            boot.send(thaw)
            event = boot.read(60, lambda _: None)
            assert event["event"] == "ready", event
        return time.perf_counter() - begin
    finally:
        microvm.stop("bare")


def starts() -> list[Promise]:
    """Cold start, warm start, memory, restart of a host's kernel."""
    import rdmalab as package
    from rdmalab.paths import cache_dir

    shutil.rmtree(cache_dir() / "snapshots", ignore_errors=True)
    cold_s = timed(lambda: rdmalab("up"))
    rows = [Promise("cold start", cold_s, None, 15.0, "s")]
    ours, bare = [], []
    for _ in range(RUNS):
        rdmalab("down")
        ours.append(timed(lambda: rdmalab("up")))
        rdmalab("down")
        bare.append(bare_restore())
    rows.append(Promise("warm start", statistics.median(ours), statistics.median(bare), 2.0, "s"))
    lab = package.up()
    for host in lab.hosts:
        host.kernel.run("import numpy, pyverbs.qp; x = bytearray(1 << 20)")
    status = Path(f"/proc/{lab.state.pid}/status").read_text()
    rss_kib = next(int(row.split()[1]) for row in status.splitlines() if row.startswith("VmRSS"))
    rows.append(Promise("memory of a two-host lab", rss_kib / 1024, None, 700, "MiB"))
    times = []
    for _ in range(RUNS):

        def restart() -> None:
            lab.alice.restart()
            lab.alice.kernel.run("1")

        times.append(timed(restart))
    rows.append(Promise("restart of a host's kernel", statistics.median(times), None, 2.0, "s"))
    rows.append(cells(lab))
    lab.down()
    return rows


def cells(lab: Lab) -> Promise:
    """A cell with ``%%on`` beside a bare jupyter_client execute to the same kernel."""
    from IPython.core.interactiveshell import InteractiveShell

    from rdmalab.channels import connect
    from rdmalab.magics import load

    shell = InteractiveShell.instance()
    load(shell)
    client = connect(kernel_of(lab, "alice"))
    code = "x = 1 + 1"

    def bare() -> None:
        client.execute_interactive(code, timeout=30, output_hook=lambda _: None)

    def ours() -> None:
        shell.run_cell_magic("on", "alice", code)

    for warm in (bare, ours):
        for _ in range(5):
            warm()
    pairs = [(timed(ours), timed(bare)) for _ in range(CELLS)]
    client.stop_channels()
    ours_s = statistics.median(pair[0] for pair in pairs)
    bare_s = statistics.median(pair[1] for pair in pairs)
    return Promise("%%on, one cell", ours_s * 1000, bare_s * 1000, 1.5, "ms")


def kernel_of(lab: Lab, name: str) -> dict[str, Any]:
    """The keys and ports of a host's kernel."""
    return next(host["kernel"] for host in lab.state.hosts if host["name"] == name)


def latency() -> list[Promise]:
    """Our latency loops beside perftest and sockperf: what ``rdmalab bench`` reports.

    Its ratio is the median of ratios that were taken in turn; ours is that many times theirs.
    """
    done = subprocess.run(
        [sys.executable, "-m", "rdmalab", "bench", "--json"],
        check=True,
        capture_output=True,
        text=True,
        timeout=900,
    )
    return [
        Promise(
            f"{row['operation']} in Python, by {row['tool']}",
            row["ratio"] * row["theirs"]["p50"],
            row["theirs"]["p50"],
            row["limit"],
            "us",
        )
        for row in json.loads(done.stdout)["rows"]
        if row["limit"] is not None
    ]


def sizes(skip_build: bool) -> list[Promise]:
    """The image: its size, and the time that it takes to build."""
    from rdmalab.image import find_image

    rows = []
    if not skip_build:
        build_s = timed(lambda: rdmalab("image", "build", "--force"))
        rows.append(Promise("image build", build_s, None, 180, "s"))
    image = find_image()
    assert image is not None, "rdmalab image build comes first"
    rows.append(Promise("image size", image.size_bytes / 1e6, None, 250, "MB"))
    return rows


def imports() -> Promise:
    """``import rdmalab`` in a new Python, less a Python that imports nothing."""
    with_it, without = [], []
    for _ in range(RUNS):
        for code, times in (("import rdmalab", with_it), ("pass", without)):
            times.append(
                timed(lambda c=code: subprocess.run([sys.executable, "-c", c], check=True))
            )
    seconds = statistics.median(with_it) - statistics.median(without)
    return Promise("import rdmalab", seconds, None, 0.3, "s")


def show(rows: list[Promise]) -> None:
    """The table: ours, reference, ratio, limit, pass or fail."""
    table = Table(title="rdmalab: the performance promises")
    for head in ("promise", "ours", "bare", "ratio", "limit", ""):
        table.add_column(head, justify="left" if head in ("promise", "") else "right")
    for row in rows:
        bare = "" if row.reference is None else f"{row.reference:.2f} {row.unit}"
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        limit = f"{row.limit:g} {row.unit}" if row.ratio is None else f"{row.limit:g} x"
        verdict = "pass" if row.kept else "FAIL"
        table.add_row(row.name, f"{row.ours:.2f} {row.unit}", bare, ratio, limit, verdict)
    Console(width=100).print(table)


def main() -> int:
    """Measure in a run-time folder of its own; exit 1 if a promise is not kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--skip-build", action="store_true", help="do not build the image again")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rdmalab-bench-", dir="/tmp") as folder:
        os.environ["RDMALAB_RUNTIME_DIR"] = folder
        rows = [*sizes(args.skip_build), *starts(), imports(), *latency()]
        subprocess.run([sys.executable, "-m", "rdmalab", "down", "--all"], capture_output=True)
    if args.json:
        document = [{**row.__dict__, "ratio": row.ratio, "kept": row.kept} for row in rows]
        print(json.dumps(document, indent=2))
    else:
        show(rows)
    return 0 if all(row.kept for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
