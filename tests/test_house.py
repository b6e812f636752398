"""The house is checked: where things may stand, how large they may get, what they may import.

A reader who opens the package for the first time should know every room. Each rule here is a table
or a number at the top; the tests below only look.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "rdmalab"

MODULE_LINES_MAX = 300
FUNCTION_LINES_MAX = 40  # without the docstring: explaining is never too long
README_LINES_MAX = 150

# ---------------------------------------------------------------- the tables

# Who may import whom. A module imports only what stands before it: rows above, or to its left in
# its own row. A new module gets its place here; if none fits, it probably mixes two things.
ORDER: dict[str, tuple[str, ...]] = {
    "rdmalab": (
        # pure data, and where files live
        "errors paths cpio topology",
        # of which the controller may import SHARED only
        "hostside",
        # runs before anything is installed
        "doctor",
        # what hosts boot from
        "recipe manifest leash packing builder shelf image",
        # where hosts live
        "limits state desk console qemu qmp snapshot shared bootport overlay microvm remote",
        "stewards dockerengine dockerimage dockerproof differences dockerhosts localhosts",
        # what a notebook talks to
        "outputs channels verdicts kernels jobs faults",
        "opcodes packets pcap decoder anatomy sequence ladder tap capture",
        "hosts lab pulse magics notebook workfolder",
        # pictures
        "view",
        # the other ways in
        "grading selftest bench imagecli hostcli capturecli checkcli gradecli cli",
        "__init__ __main__",
    ),
    "rdmalab.doctor": (
        "packages machine",
        "kvm devices ports software installer",
        "__init__ __main__",
    ),
    "rdmalab.hostside": (
        "__init__ values errands",  # `here`: in the guest this package is named rdmalab
        # a check, run beside hostile code
        "checkcode paper pristine recovery honesty process trial judge",
        "processors network cgroup deskseat children container doorway hostkernel lodging hostinit",
        # RDMA itself, what learners import: data; pieces; a whole end of a connection
        "qpstate statuses mishaps patience card ledger refusals reasons",
        "orphans guards memory bringup orders arrivals explanation",
        "connection verbs",
        "qpcall qpmove inventory answers",  # what the notebook's pictures and tables show and do
        "tools rounds percentiles measure",  # how long a message takes
        "proof",  # whether one gets through at all
        "hostlink nursery commands control agent boot",
        "keeper lodger steward",  # where hosts run on this machine's own kernel
    ),
    "rdmalab.view": (
        "asking theme quantity picture axes",
        "tables plots bars qpdrawing qpscene qpdiagram",
        "__init__",
    ),
    "rdmalab.grading": (
        "submission course apparatus briefs plans sentences",
        "results runner report feedback",
        "machine supply classroom rehearsal gradebook validation",
        "__init__",
    ),
}

# An import against that order, with the reason why it stays.
ORDER_EXCEPTIONS: dict[tuple[str, str], str] = {
    ("doctor", "dockerengine"): "asks the engine for a proof; imported only when asked",
    ("doctor", "dockerimage"): "as above",
    ("doctor", "dockerproof"): "as above",
    ("doctor", "image"): "reports whether the image is there; imported only when asked",
    ("doctor", "qemu"): "reports its proof of KVM; imported only when asked, works without",
}

# Third-party packages that belong to one room only.
ONLY_IN = {
    "pyverbs": "hostside/",
    "ipywidgets": "view",
    "anywidget": "view",
    "matplotlib": "view",
}

# Runs with a bare Python, before pip has installed anything.
STANDARD_LIBRARY_ONLY = ("errors", "paths", "doctor/", "__init__")

# Whose package on the index brings a module of another name (or brings it along).
BROUGHT_BY = {
    "IPython": "ipykernel",
    "nbconvert": "nbgrader",
    "nbformat": "nbclient",
    "requests": "docker",
    "tornado": "jupyterlab",
    "traitlets": "ipykernel",
    "zmq": "pyzmq",
}

# The two halves meet only in pure data: no module of the controller imports the hosts' side but
# for these, and the hosts' side imports nothing of the controller.
SHARED = (
    "rdmalab.hostside.values",  # how a value is written down
    "rdmalab.hostside.qpstate",  # the states of a queue pair, as the specification draws them
    "rdmalab.hostside.qpcall",  # the text of the call that moves one
    "rdmalab.hostside.checkcode",  # which names a check reads and makes
    "rdmalab.hostside.errands",  # what is done with the guest's rights: faults, captures
)

# What `import rdmalab` must not pull in: a learner waits for it in every notebook.
HEAVY = ("pyverbs", "docker", "numpy", "matplotlib", "IPython", "zmq", "jupyter_client", "scapy")

VAGUE_NAMES = ("util", "utils", "helper", "helpers", "common", "misc")

# Hosts that belong into a machine's own configuration, never into this project: whoever teaches
# behind a mirror would have to find them all. In two pieces, or this line would be found itself.
REGISTRIES = [
    f"{name}.{domain}"
    for name, domain in (
        ("deb", "debian.org"),
        ("security", "debian.org"),
        ("snapshot", "debian.org"),
        ("archive", "ubuntu.com"),
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("registry", "npmjs.org"),
        ("conda", "anaconda.org"),
    )
]

# ---------------------------------------------------------------- what there is

MODULES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    """As in ``doctor/kvm``: the module's place below the package, without the ending."""
    return str(path.relative_to(PACKAGE).with_suffix(""))


every_module = pytest.mark.parametrize("path", MODULES, ids=name_of)


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def documentable(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Every public function and class, and the public methods of public classes."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for node in tree.body:
        if isinstance(node, kinds) and not node.name.startswith("_"):
            yield node.name, node
            if isinstance(node, ast.ClassDef):
                for method in node.body:
                    if isinstance(method, kinds) and not method.name.startswith("_"):
                        yield f"{node.name}.{method.name}", method


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from ``def`` to the end, the docstring not counted."""
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is not None:
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return lines


def imports(path: Path) -> Iterator[str]:
    """The full dotted names that a module imports, also inside functions.

    Imports for the type checker only (``if TYPE_CHECKING``) do not happen and do not count. In the
    guest the hosts' side is itself named rdmalab, so there ``rdmalab.x`` means ``hostside/x``.
    """
    package = ["rdmalab", *path.relative_to(PACKAGE).parts[:-1]]
    tree = tree_of(path)
    unreal = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in unreal:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            if package[1:] == ["hostside"] and not node.level:
                stem = re.sub(r"^rdmalab\b", "rdmalab.hostside", stem)
            yield from (f"{stem}.{alias.name}" for alias in node.names)


def order_of(package: str) -> list[str]:
    return " ".join(ORDER[package]).split()


def tracked_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


# ---------------------------------------------------------------- names and sizes


@every_module
def test_a_module_fits_a_readers_head(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MODULE_LINES_MAX, f"{name_of(path)} has {lines} lines: which noun can move out?"


@every_module
def test_a_function_fits_a_screen(path: Path) -> None:
    long = {
        f.name: n for f in functions(tree_of(path)) if (n := code_lines(f)) > FUNCTION_LINES_MAX
    }
    assert not long, f"{name_of(path)}: longer than {FUNCTION_LINES_MAX} lines: {long}"


@every_module
def test_a_module_is_named_after_what_it_is_about(path: Path) -> None:
    assert not set(path.relative_to(PACKAGE).with_suffix("").parts) & set(VAGUE_NAMES)


@every_module
def test_everything_public_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(tree_of(path)), f"{name_of(path)} has no docstring"
    silent = [name for name, node in documentable(tree_of(path)) if not ast.get_docstring(node)]  # type: ignore[arg-type]  # documentable yields what can have one
    assert not silent, f"{name_of(path)}: no docstring: {', '.join(silent)}"


@every_module
def test_a_silenced_checker_gives_its_reason(path: Path) -> None:
    """`# noqa: F401` alone says nothing; the reason stands behind it or in the comment above."""
    lines = path.read_text(encoding="utf-8").splitlines()
    bare = re.compile(r"#\s*(noqa(:\s*[A-Z0-9, ]+)?|type:\s*ignore(\[[\w, -]+\])?)\s*$")
    unexplained = [
        number
        for number, line in enumerate(lines, 1)
        if bare.search(line) and not lines[max(number - 2, 0)].lstrip().startswith("#")
    ]
    assert not unexplained, f"{name_of(path)}: lines {unexplained} silence a checker without a why"


# ---------------------------------------------------------------- layers


@every_module
def test_every_module_has_its_place_in_the_order(path: Path) -> None:
    parts = name_of(path).split("/")
    package, module = ".".join(["rdmalab", *parts[:-1]]), parts[-1]
    assert package in ORDER, f"{package} is new: give it a row in ORDER (tests/test_house.py)"
    assert module in order_of(package), (
        f"{name_of(path)} is new: say in ORDER[{package!r}] (tests/test_house.py) where it stands"
    )


@every_module
def test_nothing_imports_upward(path: Path) -> None:
    parts = name_of(path).split("/")
    for depth in range(len(parts)):
        package, module = ".".join(["rdmalab", *parts[:depth]]), parts[depth]
        order = order_of(package)
        if module == "__init__" and package == "rdmalab":
            continue  # the facade shows what lies below it
        for name in imports(path):
            target = name.removeprefix(f"{package}.").split(".")[0]
            if not name.startswith(f"{package}.") or target not in order or target == module:
                continue
            allowed = order.index(target) < order.index(module)
            assert allowed or (module, target) in ORDER_EXCEPTIONS, (
                f"{package}.{module} imports {target}, which stands after it in ORDER"
            )


@every_module
def test_the_two_halves_meet_only_in_data(path: Path) -> None:
    hostside = name_of(path).startswith("hostside/")
    for name in imports(path):
        if hostside:
            assert not name.startswith("rdmalab.") or name.startswith("rdmalab.hostside"), name
        else:
            assert not name.startswith("rdmalab.hostside") or name.startswith(SHARED), name


@every_module
def test_a_library_stays_in_its_room(path: Path) -> None:
    for name in imports(path):
        room = ONLY_IN.get(name.split(".")[0])
        assert room is None or name_of(path).startswith(room), f"{name} belongs into {room}"


@every_module
def test_what_runs_before_pip_needs_only_the_standard_library(path: Path) -> None:
    if not (name_of(path) in STANDARD_LIBRARY_ONLY or name_of(path).startswith("doctor/")):
        return
    foreign = {
        top
        for name in imports(path)
        if (top := name.split(".")[0]) not in {*sys.stdlib_module_names, "rdmalab"}
    }
    assert not foreign, f"{name_of(path)} imports {foreign}"


@every_module
def test_every_library_is_declared(path: Path) -> None:
    """What the controller imports, pip has installed because pyproject.toml asks for it."""
    if name_of(path).startswith("hostside/"):
        return  # the guest's packages are Debian's: guest/packages.txt
    declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("\n[tool")[0]
    names = {name.lower() for name in re.findall(r'"([\w.-]+)[<>=]', declared)}
    for name in imports(path):
        top = name.split(".")[0]
        if top not in {*sys.stdlib_module_names, "rdmalab"}:
            assert BROUGHT_BY.get(top, top).lower() in names, f"{top} is not in pyproject.toml"


# ---------------------------------------------------------------- the facade


def test_importing_rdmalab_pulls_in_nothing_heavy() -> None:
    code = f"import sys, rdmalab; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_the_facade_promises_what_it_has() -> None:
    import rdmalab

    assert len(set(rdmalab.__all__)) == len(rdmalab.__all__)
    for name in rdmalab.__all__:
        assert getattr(rdmalab, name) is not None
    assert set(rdmalab.__all__) <= set(dir(rdmalab)), "completion would not offer these"


def test_the_facade_keeps_no_public_name_to_itself() -> None:
    import rdmalab

    tree = tree_of(PACKAGE / "__init__.py")
    made = {name for name, _ in documentable(tree) if "." not in name}
    assert made - {"load_ipython_extension"} <= set(rdmalab.__all__)


@every_module
def test_all_names_in_all_exist(path: Path) -> None:
    """For every module, without importing it: what ``__all__`` lists is made in that module."""
    tree = tree_of(path)
    listed: list[str] = []
    made = {"__version__"} if path == PACKAGE / "__init__.py" else set()
    lazy = any(f.name == "__getattr__" for f in functions(tree))
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            made |= {target.id for target in targets if isinstance(target, ast.Name)}
            if "__all__" in ast.unparse(targets[0]) and node.value is not None:
                listed = ast.literal_eval(node.value)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            made.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            made |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
    assert lazy or set(listed) <= made, f"{name_of(path)}: {set(listed) - made}"


# ---------------------------------------------------------------- everything that is committed


def test_no_file_names_a_registry_or_the_authors_own_folders() -> None:
    """Package sources are the machine's business, and a path of one machine exists on no other."""
    words = [re.compile(re.escape(word)) for word in REGISTRIES]
    if len(ROOT.parts) > 2 and ROOT.parent not in (Path.home(), Path("/home"), Path("/tmp")):
        words.append(re.compile(rf"(?<![\w.]){re.escape(str(ROOT.parent))}/"))
    words.append(re.compile(rf"(?<![\w.]){re.escape(str(ROOT))}\b"))
    found = []
    for path in tracked_files():
        text = path.read_bytes().decode("utf-8", errors="replace")
        found += [f"{path.relative_to(ROOT)}: {w.pattern}" for w in words if w.search(text)]
    assert not found, found


def test_the_readme_can_be_read_in_one_go() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= README_LINES_MAX


def test_committed_notebooks_carry_no_results() -> None:
    """Outputs, counts and widget states belong to one run, and hide whether the lab still works."""
    for path in tracked_files():
        if path.suffix != ".ipynb":
            continue
        notebook = json.loads(path.read_text(encoding="utf-8"))
        assert "widgets" not in notebook["metadata"], path
        for number, cell in enumerate(notebook["cells"]):
            assert not cell.get("outputs"), f"{path}, cell {number} has outputs"
            assert cell.get("execution_count") is None, f"{path}, cell {number} has a count"
