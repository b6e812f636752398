"""Code that runs on a host beside the next cells."""

from __future__ import annotations

import threading
import time

from .errors import HostTimeout
from .kernels import DEFAULT_TIMEOUT_S, INTERRUPT_GRACE_S, HostKernel
from .outputs import Recording
from .remote import SLICE_S

__all__ = ["Job"]


class Job:
    """Code that runs on a host beside the next cells; made by ``Host.start`` and ``%%on --bg``."""

    def __init__(self, kernel: HostKernel, code: str, timeout_s: float | None) -> None:
        self.host = kernel.name
        self.output = Recording(self.host)
        self._kernel = kernel
        self._error: BaseException | None = None
        self._started, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(code, timeout_s), name=f"rdmalab-job-{self.host}", daemon=True
        )
        self._thread.start()
        self._started.wait(5)

    def _run(self, code: str, timeout_s: float | None) -> None:
        try:
            with self._kernel.turn(timeout_s):
                self._started.set()
                self._kernel.run(code, timeout_s=timeout_s, on_output=self.output)
        except BaseException as error:
            self._error = error
        finally:
            self.output.close()
            self._ended.set()

    @property
    def done(self) -> bool:
        """Whether it has ended, well or badly."""
        return self._ended.is_set()

    def wait(self, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> None:
        """Wait for the end. Raises :class:`HostTimeout` after ``timeout_s``; the job goes on.

        An event is waited for, not the thread: a Ctrl-C in ``Thread.join`` makes Python 3.10 and
        3.11 believe that the thread has ended.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._ended.is_set():
            left = SLICE_S if end is None else end - time.monotonic()
            if left <= 0:
                raise HostTimeout(
                    self.host,
                    f"The job is still running after {timeout_s:g} s.",
                    next_step=f"Wait again, or stop it: lab.{self.host}.interrupt()",
                )
            self._ended.wait(min(SLICE_S, left))

    def result(self, timeout_s: float | None = DEFAULT_TIMEOUT_S, title: str = "") -> None:
        """Wait, replay the job's output (below ``title`` if there is any), raise what it raised."""
        self.wait(timeout_s)
        self.output.show(title)
        if self._error is not None:
            raise self._error

    def interrupt(self) -> None:
        """Stop it; ``result()`` then raises KeyboardInterrupt's remote form."""
        self._kernel.interrupt()

    def stop(self) -> None:
        """Stop it for certain: the host gets a fresh kernel if the interrupt does not help."""
        if not self.done:
            self.interrupt()
            try:
                self.wait(INTERRUPT_GRACE_S)
            except HostTimeout:
                self._kernel.restart()

    def __repr__(self) -> str:
        how = "running" if not self.done else "failed" if self._error else "done"
        return f"<Job on {self.host}: {how}>"
