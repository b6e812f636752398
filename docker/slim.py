"""Take out of an environment what no lab needs: ``slim.py PATTERNS FOLDER``.

A pattern (below ``lib/python3*/site-packages``) that matches nothing fails the build: the list
then no longer fits what is installed.
"""

import shutil
import sys
from pathlib import Path

lines = (line.partition("#")[0].strip() for line in Path(sys.argv[1]).read_text().splitlines())
(packages,) = Path(sys.argv[2]).glob("lib/python3*/site-packages")
found = {pattern: list(packages.glob(pattern)) for pattern in lines if pattern}
missing = [pattern for pattern, paths in found.items() if not paths]
if missing:
    sys.exit(f"{sys.argv[1]} names what is not installed (any more): {', '.join(missing)}")
for path in {path for paths in found.values() for path in paths}:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
