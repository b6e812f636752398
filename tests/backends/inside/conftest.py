"""For what runs in the test machine itself: hosts of the backend that RDMALAB_BACKEND names."""

from __future__ import annotations

from ...fabric.conftest import sh, shared_lab, start_shared

__all__ = ["sh", "shared_lab", "start_shared"]
