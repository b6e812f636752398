"""Pictures: the only place with matplotlib and ipywidgets.

>>> from rdmalab import view
>>> view.cdf({"RDMA SEND": lat_us, "TCP": tcp_us}, lab=lab)         # doctest: +SKIP
>>> view.sweep({"TCP": {1: (60, 55, 70), 65536: (900, 850, 1000)}}) # doctest: +SKIP
>>> view.bars({"WRITE": 6, "SEND": 375}, unit="ms")                 # doctest: +SKIP
>>> view.devices(lab), view.gids(lab)                               # doctest: +SKIP
>>> view.qp_diagram(lab.alice, "qp", peer=lab.bob)                  # doctest: +SKIP

Every picture has a description for screen readers, follows JupyterLab's light and dark theme, can
be read in greyscale, and is saved with ``.save("name.svg")`` (or ``.png``, ``.pdf``).
"""

from __future__ import annotations

from .bars import bars, ranges
from .picture import Picture
from .plots import cdf, conditions, lines, scatter, sweep
from .qpdiagram import QPDiagram, qp_diagram
from .tables import Table, devices, gids

__all__ = [
    "Picture",
    "QPDiagram",
    "Table",
    "bars",
    "cdf",
    "conditions",
    "devices",
    "gids",
    "lines",
    "qp_diagram",
    "ranges",
    "scatter",
    "sweep",
]
