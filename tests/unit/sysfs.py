"""A tree like /sys with RDMA devices in it, for what reads one."""

from __future__ import annotations

from pathlib import Path

__all__ = ["device"]


def device(
    root: Path,
    name: str,
    *,
    gids: dict[int, tuple[str, str]] | None = None,
    netdev: str = "eth0",
    state: str = "4: ACTIVE",
    layer: str = "Ethernet",
    uverbs: int | None = None,
) -> None:
    """One device with one port. ``gids``: row to (GID as sysfs writes it, type)."""
    port = root / "sys/class/infiniband" / name / "ports/1"
    for folder in ("gids", "gid_attrs/types", "gid_attrs/ndevs"):
        (port / folder).mkdir(parents=True)
    (port / "state").write_text(state + "\n")
    (port / "link_layer").write_text(layer + "\n")
    for row, (gid, kind) in (gids or {}).items():
        (port / "gids" / str(row)).write_text(gid + "\n")
        (port / "gid_attrs/types" / str(row)).write_text(kind + "\n")
        (port / "gid_attrs/ndevs" / str(row)).write_text(netdev + "\n")
    if uverbs is not None:
        entry = root / "sys/class/infiniband_verbs" / f"uverbs{uverbs}"
        entry.mkdir(parents=True)
        (entry / "ibdev").write_text(name + "\n")
