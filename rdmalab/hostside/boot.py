"""What the guest's init starts as process 1: forks the nursery at once, then becomes the agent.

The nursery's imports take seconds under emulation, so they begin as soon as there is another
processor to run them.
"""

import os
import socket
import sys

sys.path.insert(0, "/opt/rdmalab")
from rdmalab.processors import start_all

start_all()
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
if os.fork() == 0:
    ours.close()
    from rdmalab.nursery import serve

    serve(theirs)
theirs.close()

from rdmalab.agent import main  # noqa: E402 - after the fork, for the reason above

main(ours)
