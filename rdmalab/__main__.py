"""``python -m rdmalab`` is the command line."""

from .cli import main

main()
