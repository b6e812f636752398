"""``python3 -m rdmalab.doctor``: the doctor before there is an ``rdmalab`` command."""

from __future__ import annotations

import argparse
import json
import signal
import sys

from ..errors import RdmalabError
from . import BACKENDS, fix, render, run_checks, software, works


def main(arguments: list[str] | None = None) -> int:
    """Run the doctor; 0 where the backend works here, 1 where it cannot, 2 for wrong usage."""
    options = _parser().parse_args(arguments)
    old = software.python()
    if old.status == "fail":
        print(f"rdmalab: {old.detail}. {old.fix}", file=sys.stderr)
        return 1
    try:
        if options.fix:
            fix(options.test)
            if options.system:
                return 0
    except RdmalabError as error:
        print(f"rdmalab: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("rdmalab: stopped before everything was installed; run it again.", file=sys.stderr)
        return 130
    load = options.fix and options.backend == "local"
    checks = run_checks(options.backend, system=options.system, test=options.test, load=load)
    if options.json:
        print(json.dumps([check._asdict() for check in checks], indent=2))
    else:
        print(render(checks, colour=sys.stdout.isatty()))
    return 0 if works(checks) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rdmalab.doctor", description="Check this machine.")
    parser.add_argument("--fix", action="store_true", help="install what is missing (apt-get)")
    parser.add_argument("--system", action="store_true", help="only what the system has to give")
    parser.add_argument("--test", action="store_true", help="also what the tests need")
    parser.add_argument("--json", action="store_true", help="print one JSON list")
    parser.add_argument("--backend", choices=BACKENDS, default="vm", help="what is to work")
    return parser


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends us, without a traceback
    sys.exit(main())
