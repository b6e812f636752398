"""Print what pyproject.toml asks for, a requirement a line: ``requirements.py FILE +hub -docker``.

So that the packages are a layer of their own, which a change of our code does not touch. ``+NAME``
adds an extra, ``-NAME`` leaves a package out.
"""

import re
import sys

import tomllib

with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
wanted = list(project["dependencies"])
for word in sys.argv[2:]:
    if word.startswith("+"):
        wanted += project["optional-dependencies"][word[1:]]
for word in sys.argv[2:]:
    if word.startswith("-"):
        (unwanted,) = [line for line in wanted if re.split(r"[<>=\[]", line)[0] == word[1:]]
        wanted.remove(unwanted)
print("\n".join(wanted))
