"""``python -m rdmalab``, and the console script's entry."""

import os
import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line; Ctrl-C while it loads ends in one line, as it does later."""
    try:
        from .cli import main as run
    except KeyboardInterrupt:
        print("rdmalab: interrupted.", file=sys.stderr, flush=True)
        os._exit(130)
    run()


if __name__ == "__main__":
    main()
