"""A question to a host's kernel in between: no output, no history, no names left behind."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ..errors import HostBusy, remote_error
from ..remote import lab_gone

if TYPE_CHECKING:
    from ..lab import Host

__all__ = ["ask"]

MIME = "application/vnd.rdmalab.answer+json"  # as in rdmalab.answers on the host
PATIENCE_S = 5.0


def ask(host: Host, module: str, question: str, *words: Any, timeout_s: float = PATIENCE_S) -> Any:
    """What a function of a module on the host answers; ``words`` and answer are plain data.

    A host that is at work is neither waited for nor interrupted: that raises :class:`HostBusy`.
    Other errors: ``LabGone``, and what the function raised.
    """
    if not host.kernel.remote.state.alive():
        raise lab_gone(host.kernel.remote.state)
    arguments = ", ".join(repr(word) for word in json.loads(json.dumps([module, question, *words])))
    call = f'__import__("rdmalab.answers").answers.tell({arguments})'
    content = {
        "code": "",
        "silent": True,
        "store_history": False,
        "user_expressions": {"answer": call},
        "allow_stdin": False,
        "stop_on_error": False,
    }
    reply = host.kernel.ask("execute_request", content, timeout_s)
    answer = (reply or {}).get("user_expressions", {}).get("answer")
    if answer is None:
        raise HostBusy(
            host.name,
            "is at work, or does not answer.",
            next_step=f"Wait for it with %wait {host.name}, or stop it:"
            f" lab.{host.name}.interrupt()",
        )
    if answer["status"] != "ok":
        raise remote_error(host.name, answer["ename"], answer["evalue"], answer["traceback"])
    return answer["data"][MIME]
