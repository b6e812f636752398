"""A question to a host's kernel in between: no output, no history, no names left behind."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ..errors import BackendError, HostBusy

if TYPE_CHECKING:
    from ..lab import Host

__all__ = ["ask"]

MIME = "application/vnd.rdmalab.answer+json"  # as in rdmalab.answers on the host


def ask(host: Host, module: str, question: str, *words: Any, timeout_s: float = 10.0) -> Any:
    """What a function of a module on the host answers; ``words`` and answer are plain data.

    Does not wait for a host that is at work: that raises :class:`HostBusy` at once. Raises what
    :meth:`HostKernel.run` raises.
    """
    arguments = ", ".join(repr(word) for word in json.loads(json.dumps([module, question, *words])))
    answers: list[Any] = []

    def collect(message: dict[str, Any]) -> None:
        data = message["content"].get("data", {})
        if MIME in data:
            answers.append(data[MIME])

    lock = host.kernel.lock
    if not lock.acquire(blocking=False):
        raise HostBusy(
            host.name,
            "is busy with something else.",
            next_step=f"Wait for it with %wait {host.name}, or stop it:"
            f" lab.{host.name}.interrupt()",
        )
    try:
        host.kernel.run(
            f'__import__("rdmalab.answers").answers.tell({arguments})',
            timeout_s=timeout_s,
            on_output=collect,
            store_history=False,
        )
    finally:
        lock.release()
    if not answers:
        raise BackendError(f"[{host.name}] gave no answer to {question!r}.")
    return answers[0]
