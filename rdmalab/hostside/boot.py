"""What the guest's init starts as process 1; see ``agent``."""

import sys

sys.path.insert(0, "/opt/rdmalab")

from rdmalab.agent import main

main()
