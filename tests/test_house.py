"""The rules of the house, checked on our own source; a rule that is not here is a wish.

Each rule is a function from one file (or the import graph) to the violations in it, and has a test of its own
that shows it a violation, so that no rule rots into one that finds nothing.
"""

from __future__ import annotations

import ast
import re
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from support.torch_names import has, names_of, used_names

ROOT = Path(__file__).resolve().parents[1]

# Who may import whom: a package imports from those before it in this chain, never from one behind it, nor from one
# beside it. The first six are single modules, which know each other.
LAYERS = (
    {"_native", "errors", "config", "arguments", "display", "uncopied", "cached"},
    {"formats"},
    {"commit"},
    {"events"},
    {"transfer"},
    {"saving", "loading"},
    {"distributed", "streaming", "rows"},
    {"dcp"},
    {"api"},
    {"checkpointer", "contents"},
    {"integrations"},
    {"cli"},
    {"__main__", "examples"},
)
LAYER_OF = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}

# Names that torch 2.7 lacks, and that are used only where torch has them.
NEWER_NAMES_OF_TORCH = {
    "torch.distributed.checkpoint.filesystem.CURRENT_DCP_VERSION",
    "torch.distributed.checkpoint.staging.DefaultStager",
    "torch.distributed.checkpoint.staging.StagingOptions",
}

# Bytes and integers: these never see a tensor, so they are tested and fuzzed without torch.
PURE_ROOMS = {"errors", "config", "arguments", "display", "formats"}

# Integrations use public names. torch_dcp is the name under which a package is reached.
INTEGRATION_EXCEPTIONS = {Path("integrations/torch_dcp.py"): {"dcp"}}

# What a folder of csrc may include from csrc.
NATIVE_LAYERS = {
    "core": {"core"},
    "device": {"core", "device"},
    "engine": {"core", "device", "engine"},
    "transfer": {"core", "engine", "device", "transfer"},
    "rows": {"core", "engine", "transfer", "rows"},
    "binding": {"core", "engine", "device", "transfer", "rows", "binding"},
}
FOREIGN_HEADER = re.compile(r"Python\.h|pybind11/|torch/|ATen/|c10/|cuda(?!_double)|cufile|nccl|liburing|libaio")

STREAM_HEADERS = {"fstream", "iomanip", "iostream", "istream", "locale", "ostream", "regex", "sstream"}
"""Use facets, of which there are two sets where the module has a C++ library of its own."""

FILE_LINES_MAX = 800
FOLDER_FILES_MAX = 18
"""Python modules of one folder, `__init__` not counted, or .cc files."""
FUNCTION_LINES_MAX = 80
"""Lines of one function, its docstring not counted."""
COLUMNS_MAX = 120
UNFINISHED_WORDS = ("TO" + "DO", "FIX" + "ME", "XX" + "X")  # in pieces, or this file would break its own rule
UNFINISHED_MARK = re.compile(rf"\b({'|'.join(UNFINISHED_WORDS)})\b")


# --- what is checked ---


def files_below(*patterns: str) -> list[Path]:
    """Return our files that match, as paths from the root; .venv and build are outside every pattern."""
    return sorted(path.relative_to(ROOT) for pattern in patterns for path in ROOT.glob(pattern) if path.is_file())


PACKAGE_FILES = files_below("fastpersist/**/*.py", "integrations/**/*.py")
EXAMPLE_FILES = files_below("examples/**/*.py")
BENCHMARK_FILES = files_below("benchmarks/**/*.py")
PYTHON_FILES = [
    *PACKAGE_FILES,
    *EXAMPLE_FILES,
    *BENCHMARK_FILES,
    *files_below("setup.py", "tests/**/*.py", "fastpersist/**/*.pyi"),
]
NATIVE_FILES = files_below("csrc/**/*.cc", "csrc/**/*.h", "tests/csrc/*.cc", "tests/csrc/*.h")
ABI_FILES = files_below("tests/abi/*.cc", "tests/abi/*.h")  # the only ones that include foreign headers


parsed = cache(ast.parse)  # most rules look at the same files


def room_of(path: Path) -> str:
    """Return the room of a file: its module, or the folder it is in below the package."""
    inside = path.with_suffix("").parts
    return inside[0] if inside[0] != "fastpersist" else inside[1]


def imported_modules(path: Path, tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield the absolute name of each module that is imported, wherever in the file, and the line."""
    package = list(path.with_suffix("").parts)
    if package[0] == "integrations":
        package.insert(0, "fastpersist")
    package.pop()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *(node.module.split(".") if node.module else [])])
            for alias in node.names:
                # `from fastpersist import formats` imports a package, `from fastpersist import save` does not.
                submodule = f"{source}.{alias.name}"
                yield (submodule if is_our_module(submodule) else source), node.lineno


def is_our_module(name: str) -> bool:
    """Tell whether `fastpersist.x` is a module of the package, not a name inside one."""
    first, *rest = name.split(".")
    if first != "fastpersist" or not rest:
        return False
    return rest[0] in LAYER_OF and (len(rest) == 1 or (ROOT / "fastpersist" / Path(*rest)).with_suffix(".py").is_file())


def rooms_imported(path: Path, tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield the rooms of the package that a file imports; "fastpersist" stands for its public names."""
    for name, line in imported_modules(path, tree):
        if name == "fastpersist":
            yield name, line
        elif name.startswith("fastpersist."):
            yield name.split(".")[1], line


# --- rules on imports ---


def imports_run_downwards(path: Path, tree: ast.Module) -> list[str]:
    room = room_of(path)
    if room == "__init__":  # of the package itself: it stands above all rooms
        return []
    if room not in LAYER_OF:
        return [f"{path}: {room} is not in LAYERS of tests/test_house.py; decide whom it may import"]
    found = []
    for imported, line in rooms_imported(path, tree):
        if imported == "fastpersist":
            if LAYER_OF[room] < LAYER_OF["integrations"]:
                found.append(f"{path}:{line}: imports the public names, which are made from {room}")
        elif imported not in LAYER_OF:
            found.append(f"{path}:{line}: imports fastpersist.{imported}, which LAYERS does not know")
        elif LAYER_OF[imported] > LAYER_OF[room]:
            found.append(f"{path}:{line}: {room} imports {imported}, which is above it")
        elif LAYER_OF[imported] == LAYER_OF[room] > 0 and imported != room:
            found.append(f"{path}:{line}: {room} imports {imported}, which is beside it")
    return found


def rooms_have_no_cycle(edges: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return [f"rooms import each other: {' -> '.join(error.args[1])}"]
    return []


def outsiders_use_public_names(path: Path, tree: ast.Module) -> list[str]:
    allowed = {"fastpersist", "events", "integrations"} | INTEGRATION_EXCEPTIONS.get(path, set())
    return [
        f"{path}:{line}: imports fastpersist.{room}; only public names may be used here"
        for room, line in rooms_imported(path, tree)
        if room not in allowed
    ]


def pure_rooms_do_without_torch(path: Path, tree: ast.Module) -> list[str]:
    if room_of(path) not in PURE_ROOMS:
        return []
    return [
        f"{path}:{line}: imports {name}, but {room_of(path)} deals in bytes and integers only"
        for name, line in imported_modules(path, tree)
        if name.split(".")[0] in ("torch", "numpy")
    ]


def integrations_have_one_name(path: Path, tree: ast.Module) -> list[str]:
    return [
        f"{path}:{line}: say fastpersist.integrations; `integrations` would be a second copy of it"
        for name, line in imported_modules(path, tree)
        if name.split(".")[0] == "integrations"
    ]


def native_includes_run_downwards(path: Path, text: str) -> list[str]:
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        match = re.match(r'\s*#\s*include\s+[<"]([^">]+)[">]', line)
        if match is None:
            continue
        header = match[1]
        folder = path.parts[1]
        if path.parts[0] == "csrc" and header in STREAM_HEADERS:
            found.append(f"{path}:{number}: includes {header}; core/kernel_file.h says why not, and reads files")
        if folder != "binding" and FOREIGN_HEADER.match(header):
            found.append(f"{path}:{number}: includes {header}; only binding/ may see it")
        target = header.split("/")[0]
        if path.parts[0] == "csrc" and target in NATIVE_LAYERS and target not in NATIVE_LAYERS[folder]:
            found.append(f"{path}:{number}: {folder}/ includes {header}, which is above it")
    return found


# --- rules on tests ---

PROGRAMS_OF_TESTS = {"subprocess", "multiprocessing"}
PROGRAMS_OF_SUPPORT = {f"support.{name}" for name in ("process_groups", "programs", "spawned_ranks", "torchrun")}


def unit_tests_start_no_programs(path: Path, tree: ast.Module) -> list[str]:
    """Find imports of what starts programs or ranks; a fork that `support.forking` makes is cheap, and allowed."""
    return [
        f"{path}:{line}: imports {name}; what starts programs goes to tests/programs, ranks to tests/ranks"
        for name, line in imported_modules(path, tree)
        if name.split(".")[0] in PROGRAMS_OF_TESTS or name in PROGRAMS_OF_SUPPORT
    ]


# --- rules on folders ---


def modules_have_tests(modules: Iterable[Path], tests: Sequence[Path]) -> list[str]:
    """Find modules that no test file is named after, nor after the folder that they are in below their package."""
    found = []
    for path in modules:
        inside = path.relative_to("fastpersist").with_suffix("")
        if path.stem in ("__init__", "__main__"):
            continue
        # Of cli/bench/io/rows.py: rows, bench_rows, io_rows, bench, io, bench_io; in a folder of its package, or where
        # packages have none.
        names = {
            test.stem.removeprefix("test_")
            for test in tests
            if inside.parts[0] in test.parts
            or test.parts[1] in ("ranks", "devices", "programs")
            or len(inside.parts) == 1
        }
        folders = inside.parts[1:-1]
        wanted = {path.stem, *folders, "_".join(folders), *(f"{folder}_{path.stem}" for folder in inside.parts[:-1])}
        named = any(name == one or name.startswith(f"{one}_") for one in wanted - {""} for name in names)
        if not named:
            found.append(f"{path}: no test file has its name")
    return found


def packages_map_their_modules(init: Path, source: str, modules: Iterable[Path]) -> list[str]:
    """Find modules that the first page of their package does not name, and so gives no place among the others."""
    words = set(re.findall(r"\w+", ast.get_docstring(ast.parse(source)) or ""))
    return [
        f"{init}: its docstring does not say where {path.stem} belongs"
        for path in modules
        if path.parent == init.parent and path != init and path.stem not in words
    ]


# --- rules on text ---


def file_is_short(path: Path, text: str) -> list[str]:
    count = len(text.splitlines())
    return [f"{path}: {count} lines, more than {FILE_LINES_MAX}"] if count > FILE_LINES_MAX else []


def lines_are_short(path: Path, text: str) -> list[str]:
    return [
        f"{path}:{number}: {len(line)} columns, more than {COLUMNS_MAX}"
        for number, line in enumerate(text.splitlines(), 1)
        if len(line) > COLUMNS_MAX
    ]


def nothing_is_left_unfinished(path: Path, text: str) -> list[str]:
    return [
        f"{path}:{number}: {match[0]}: finish it, or leave it out"
        for number, line in enumerate(text.splitlines(), 1)
        if (match := UNFINISHED_MARK.search(line))
    ]


def file_says_what_it_is_for(path: Path, text: str) -> list[str]:
    if path.suffix in (".cc", ".h"):
        if path.suffix == ".cc" and (ROOT / path.with_suffix(".h")).is_file():
            return []  # its header says it
        return [] if text.startswith("//") else [f"{path}: does not open with a comment that states its job"]
    return [] if ast.get_docstring(parsed(text)) else [f"{path}: has no docstring that states its job"]


# --- rules on folders ---


def folders_are_not_full(paths: Iterable[Path]) -> list[str]:
    counts = Counter(path.parent.as_posix() for path in paths if path.name != "__init__.py")
    return [
        f"{folder}: {count} modules, more than {FOLDER_FILES_MAX}; make a folder of those that belong together"
        for folder, count in sorted(counts.items())
        if count > FOLDER_FILES_MAX
    ]


# --- rules on Python code ---


def functions_are_short(path: Path, tree: ast.Module) -> list[str]:
    return [
        f"{path}:{node.lineno}: {node.name} has {count} lines without its docstring, more than {FUNCTION_LINES_MAX}"
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (count := lines_of(node)) > FUNCTION_LINES_MAX
    ]


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count the lines of a function from `def` to its end, without its docstring."""
    first = function.body[0]
    docstring_lines = 0 if ast.get_docstring(function) is None else last_line(first) - first.lineno + 1
    return last_line(function) - function.lineno + 1 - docstring_lines


def last_line(node: ast.stmt) -> int:
    return node.lineno if node.end_lineno is None else node.end_lineno


def nothing_is_printed(path: Path, tree: ast.Module) -> list[str]:
    if room_of(path) in ("cli", "examples"):
        return []
    return [
        f"{path}:{node.lineno}: print(); a library logs or raises"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]


def no_except_is_bare(path: Path, tree: ast.Module) -> list[str]:
    return [
        f"{path}:{node.lineno}: bare except, which swallows KeyboardInterrupt too"
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler) and node.type is None
    ]


def no_assert_guards_run_time(path: Path, tree: ast.Module) -> list[str]:
    return [
        f"{path}:{node.lineno}: assert, which python -O removes; raise InternalError"
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert)
    ]


def public_names_are_documented(module: types.ModuleType) -> list[str]:
    found = []
    for name in module.__all__:
        value = getattr(module, name, None)
        if value is None:
            found.append(f"{module.__name__}.{name}: is in __all__ and does not exist")
        elif (callable(value) or isinstance(value, types.ModuleType)) and not (value.__doc__ or "").strip():
            found.append(f"{module.__name__}.{name}: has no docstring")
    return found


def public_names_are_no_modules(module: types.ModuleType, module_names: set[str]) -> list[str]:
    return [
        f"{module.__name__}.{name}: is a module too; which of the two one gets depends on the imports so far"
        for name in sorted(set(module.__all__) & module_names)
    ]


# --- the rules on our source ---

TextRule = Callable[[Path, str], list[str]]
TreeRule = Callable[[Path, ast.Module], list[str]]

TEXT_RULES: list[tuple[TextRule, list[Path]]] = [
    (file_is_short, [*PYTHON_FILES, *NATIVE_FILES, *ABI_FILES]),
    (lines_are_short, [*PYTHON_FILES, *NATIVE_FILES, *ABI_FILES]),
    (nothing_is_left_unfinished, [*PYTHON_FILES, *NATIVE_FILES, *ABI_FILES]),
    (file_says_what_it_is_for, [*PYTHON_FILES, *NATIVE_FILES, *ABI_FILES]),
    (native_includes_run_downwards, NATIVE_FILES),
]
TREE_RULES: list[tuple[TreeRule, list[Path]]] = [
    (imports_run_downwards, [*PACKAGE_FILES, *EXAMPLE_FILES]),
    (
        outsiders_use_public_names,
        [p for p in [*PACKAGE_FILES, *EXAMPLE_FILES] if p.parts[0] != "fastpersist"],
    ),
    (pure_rooms_do_without_torch, PACKAGE_FILES),
    (integrations_have_one_name, [p for p in PYTHON_FILES if p.suffix == ".py"]),
    (unit_tests_start_no_programs, files_below("tests/unit/**/*.py")),
    (functions_are_short, [*PACKAGE_FILES, *EXAMPLE_FILES, *BENCHMARK_FILES]),
    (nothing_is_printed, PACKAGE_FILES),
    (no_except_is_bare, [p for p in PYTHON_FILES if p.suffix == ".py"]),
    (no_assert_guards_run_time, PACKAGE_FILES),
]


def expect_none(violations: Iterable[str]) -> None:
    if found := list(violations):
        pytest.fail("\n".join(found), pytrace=False)


@pytest.mark.parametrize(("rule", "paths"), TEXT_RULES, ids=[r.__name__ for r, _ in TEXT_RULES])
def test_text_follows(rule: TextRule, paths: list[Path]) -> None:
    expect_none(violation for path in paths for violation in rule(path, (ROOT / path).read_text()))


@pytest.mark.parametrize(("rule", "paths"), TREE_RULES, ids=[r.__name__ for r, _ in TREE_RULES])
def test_code_follows(rule: TreeRule, paths: list[Path]) -> None:
    expect_none(v for path in paths for v in rule(path, parsed((ROOT / path).read_text())))


def test_folders_are_not_full() -> None:
    native_modules = [path for path in NATIVE_FILES if path.suffix == ".cc" and path.parts[0] == "csrc"]
    expect_none(folders_are_not_full([*PACKAGE_FILES, *EXAMPLE_FILES, *BENCHMARK_FILES, *native_modules]))


def test_rooms_have_no_cycle() -> None:
    edges: dict[str, set[str]] = {}
    for path in PACKAGE_FILES:
        room = room_of(path)
        imported = {other for other, _ in rooms_imported(path, parsed((ROOT / path).read_text()))}
        edges.setdefault(room, set()).update(imported - {room, "fastpersist"})
    expect_none(rooms_have_no_cycle(edges))


def test_modules_have_tests() -> None:
    modules = [path for path in PACKAGE_FILES if path.parts[0] == "fastpersist"]
    expect_none(modules_have_tests(modules, files_below("tests/**/test_*.py")))


def test_every_package_is_installed() -> None:
    listed = re.search(r"^packages = \[\n(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE)
    assert listed is not None
    folders = {path.parent.as_posix().replace("/", ".") for path in PACKAGE_FILES if path.name == "__init__.py"}
    expected = sorted(re.sub("^integrations", "fastpersist.integrations", folder) for folder in folders)
    assert re.findall('"(.*)"', listed[1]) == expected


def test_packages_map_their_modules() -> None:
    inits = [path for path in files_below("fastpersist/**/__init__.py") if path.parts[1] not in ("cli", "__init__.py")]
    assert len(inits) > 8
    expect_none(v for init in inits for v in packages_map_their_modules(init, (ROOT / init).read_text(), PACKAGE_FILES))


def test_public_names_are_documented() -> None:
    import fastpersist

    expect_none(public_names_are_documented(fastpersist))


def test_public_names_are_no_modules() -> None:
    import fastpersist

    module_names = {path.stem for path in (ROOT / "fastpersist").iterdir()}
    expect_none(public_names_are_no_modules(fastpersist, module_names))


def test_versions_agree() -> None:
    import fastpersist

    declared = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert declared is not None
    assert fastpersist.__version__ == declared[1]


def test_the_oldest_torch_has_all_names_that_are_used() -> None:
    known = (ROOT / "tests/data/torch-2.7-names.txt").read_text().split()
    assert used_names() - set(known) == NEWER_NAMES_OF_TORCH, "see tests/support/torch_names.py"


def test_all_kinds_of_files_are_looked_at() -> None:
    assert Path("fastpersist/errors.py") in PACKAGE_FILES
    assert Path("integrations/__init__.py") in PACKAGE_FILES
    assert Path("csrc/core/status.h") in NATIVE_FILES
    assert not [path for path in [*PYTHON_FILES, *NATIVE_FILES] if path.parts[0] in (".venv", "build")]


# --- the rules on source that breaks them ---

LAYOUT = Path("fastpersist/formats/layout.py")
PLUGIN = Path("integrations/lightning/plugin.py")


@pytest.mark.parametrize(
    ("rule", "path", "source", "count"),
    [
        (imports_run_downwards, LAYOUT, "from fastpersist.commit.file_commit import sweep", 1),
        (imports_run_downwards, LAYOUT, "from fastpersist import commit", 1),
        (imports_run_downwards, LAYOUT, "from .. import commit", 1),
        (imports_run_downwards, LAYOUT, "from ..commit import sweep", 1),
        (imports_run_downwards, Path("fastpersist/loading/restore.py"), "from fastpersist.saving import skeleton", 1),
        (imports_run_downwards, LAYOUT, "def f():\n    import fastpersist.api", 1),
        (imports_run_downwards, LAYOUT, "from fastpersist import save", 1),
        (imports_run_downwards, LAYOUT, "import fastpersist.unheard_of", 1),
        (imports_run_downwards, Path("fastpersist/unheard_of.py"), "", 1),
        (imports_run_downwards, Path("fastpersist/formats/torch_zip.py"), "from ..saving import skeleton", 1),
        (
            imports_run_downwards,
            Path("fastpersist/checkpointer/checkpointer.py"),
            "from fastpersist.cli import main",
            1,
        ),
        (imports_run_downwards, Path("integrations/accelerate.py"), "import fastpersist.cli", 1),
        (
            imports_run_downwards,
            Path("fastpersist/cli/info.py"),
            "from fastpersist import api, save\nfrom fastpersist.formats import layout",
            0,
        ),
        (imports_run_downwards, Path("fastpersist/__main__.py"), "from fastpersist.cli import main", 0),
        (imports_run_downwards, LAYOUT, "import os\nfrom fastpersist.errors import ConfigError", 0),
        (outsiders_use_public_names, PLUGIN, "from fastpersist import formats", 1),
        (outsiders_use_public_names, PLUGIN, "import fastpersist.commit.file_commit", 1),
        (
            outsiders_use_public_names,
            PLUGIN,
            "from fastpersist import save\nfrom . import x",
            0,
        ),
        (
            outsiders_use_public_names,
            Path("integrations/torch_dcp.py"),
            "from fastpersist.dcp import writer",
            0,
        ),
        (outsiders_use_public_names, Path("integrations/lightning/torch_dcp.py"), "import fastpersist.dcp.writer", 1),
        (outsiders_use_public_names, Path("examples/quickstart.py"), "from fastpersist.api import save", 1),
        (pure_rooms_do_without_torch, LAYOUT, "import torch", 1),
        (pure_rooms_do_without_torch, LAYOUT, "from torch.serialization import load", 1),
        (pure_rooms_do_without_torch, Path("fastpersist/formats/safetensors.py"), "import numpy as np", 1),
        (pure_rooms_do_without_torch, Path("fastpersist/saving/skeleton.py"), "import torch", 0),
        (integrations_have_one_name, Path("tests/unit/test_x.py"), "import integrations", 1),
        (integrations_have_one_name, Path("tests/unit/test_x.py"), "from integrations.lightning import X", 1),
        (integrations_have_one_name, Path("tests/unit/test_x.py"), "import fastpersist.integrations", 0),
        (unit_tests_start_no_programs, Path("tests/unit/test_x.py"), "import subprocess", 1),
        (unit_tests_start_no_programs, Path("tests/unit/test_x.py"), "from support.process_groups import run_ranks", 1),
        (unit_tests_start_no_programs, Path("tests/unit/test_x.py"), "from support.forking import Child", 0),
        (nothing_is_printed, LAYOUT, "print(1)", 1),
        (nothing_is_printed, Path("fastpersist/cli/info.py"), "print(1)", 0),
        (no_except_is_bare, LAYOUT, "try:\n    pass\nexcept:\n    pass", 1),
        (no_except_is_bare, LAYOUT, "try:\n    pass\nexcept OSError:\n    pass", 0),
        (no_assert_guards_run_time, LAYOUT, "assert 1", 1),
        (functions_are_short, LAYOUT, "def f():\n" + "    1\n" * FUNCTION_LINES_MAX, 1),
        (functions_are_short, LAYOUT, "class C:\n  async def f():\n" + "    1\n" * FUNCTION_LINES_MAX, 1),
        (functions_are_short, LAYOUT, "def f():\n" + "    1\n" * (FUNCTION_LINES_MAX - 1), 0),
        (functions_are_short, LAYOUT, 'def f():\n    """A\nB\nC"""\n' + "    1\n" * (FUNCTION_LINES_MAX - 1), 0),
    ],
)
def test_code_rule_finds(rule: TreeRule, path: Path, source: str, count: int) -> None:
    assert len(rule(path, ast.parse(source))) == count


@pytest.mark.parametrize(
    ("rule", "path", "source", "count"),
    [
        (native_includes_run_downwards, Path("csrc/core/file.cc"), '#include "engine/engine.h"', 1),
        (
            native_includes_run_downwards,
            Path("csrc/engine/uring_engine.cc"),
            '#include "transfer/transfer_callbacks.h"',
            1,
        ),
        (native_includes_run_downwards, Path("csrc/device/device.cc"), '#include "engine/engine.h"', 1),
        (
            native_includes_run_downwards,
            Path("csrc/transfer/io_pump.cc"),
            "#include <pybind11/pybind11.h>",
            1,
        ),
        (native_includes_run_downwards, Path("csrc/transfer/io_pump.cc"), "# include <cuda_runtime.h>", 1),
        (native_includes_run_downwards, Path("csrc/engine/uring_engine.cc"), "#include <fstream>", 1),
        (native_includes_run_downwards, Path("tests/csrc/status_test.cc"), "#include <sstream>", 0),
        (native_includes_run_downwards, Path("csrc/engine/uring_engine.cc"), "#include <liburing.h>", 1),
        (native_includes_run_downwards, Path("tests/csrc/status_test.cc"), "#include <Python.h>", 1),
        (native_includes_run_downwards, Path("tests/csrc/status_test.cc"), '#include "core/status.h"', 0),
        (native_includes_run_downwards, Path("csrc/binding/module.cc"), "#include <pybind11/pybind11.h>", 0),
        (native_includes_run_downwards, Path("csrc/transfer/io_pump.cc"), '#include "engine/engine.h"', 0),
        (file_is_short, LAYOUT, "\n" * (FILE_LINES_MAX + 1), 1),
        (file_is_short, LAYOUT, "\n" * FILE_LINES_MAX, 0),
        (lines_are_short, LAYOUT, "x" * (COLUMNS_MAX + 1), 1),
        (lines_are_short, LAYOUT, "x" * COLUMNS_MAX, 0),
        (nothing_is_left_unfinished, LAYOUT, f"# {UNFINISHED_WORDS[0]}: later", 1),
        (nothing_is_left_unfinished, Path("csrc/core/file.cc"), f"// {UNFINISHED_WORDS[1]}", 1),
        (nothing_is_left_unfinished, LAYOUT, "todos = []", 0),
        (file_says_what_it_is_for, LAYOUT, "import os", 1),
        (file_says_what_it_is_for, LAYOUT, '"""Turns storages into extents."""', 0),
        (file_says_what_it_is_for, Path("csrc/core/file.h"), "#pragma once", 1),
        (file_says_what_it_is_for, Path("csrc/binding/module.cc"), "#include <cstdio>", 1),
        (file_says_what_it_is_for, Path("csrc/core/status.cc"), '#include "core/status.h"', 0),
        (file_says_what_it_is_for, Path("csrc/core/file.h"), "// One file descriptor.", 0),
    ],
)
def test_text_rule_finds(rule: TextRule, path: Path, source: str, count: int) -> None:
    assert len(rule(path, source)) == count


def test_names_of_torch_are_found() -> None:
    source = """
import torch, torch.distributed as dist
from torch import nn
def f():
    from torch.serialization import add_safe_globals as allow
    allow([nn.Linear]), dist.barrier(), torch.cuda.Event(True).record(), getattr(torch, "newer"), nothing.of_torch
"""
    assert names_of(source) - {"torch", "torch.cuda", "torch.distributed"} == {
        "torch.nn",
        "torch.nn.Linear",
        "torch.serialization.add_safe_globals",
        "torch.distributed.barrier",
        "torch.cuda.Event",
    }
    assert has("torch.nn.Linear")
    assert not has("torch.nn.of_no_torch")
    assert not has("torch.of_no_torch.name")


def test_full_folder_is_found() -> None:
    modules = [Path(f"fastpersist/formats/module_{number}.py") for number in range(FOLDER_FILES_MAX)]
    assert not folders_are_not_full([*modules, Path("fastpersist/formats/__init__.py")])
    assert len(folders_are_not_full([*modules, Path("fastpersist/formats/one_more.py")])) == 1


def test_cycle_is_found() -> None:
    assert rooms_have_no_cycle({"saving": {"distributed"}, "distributed": {"saving"}})
    assert not rooms_have_no_cycle({"commit": {"formats"}, "formats": set()})


def test_module_without_tests_is_found() -> None:
    tests = [Path("tests/unit/formats/test_layout_limits.py"), Path("tests/programs/cli/test_bench_io.py")]
    assert not modules_have_tests([LAYOUT, Path("fastpersist/cli/bench/io/rows.py")], tests)
    assert len(modules_have_tests([Path("fastpersist/formats/lay.py"), LAYOUT], tests)) == 1


def test_module_that_is_on_no_map_is_found() -> None:
    init, modules = Path("fastpersist/formats/__init__.py"), [LAYOUT, Path("fastpersist/formats/pickle_scan.py")]
    assert not packages_map_their_modules(init, '"""Files: layout, then `pickle_scan`."""', modules)
    assert len(packages_map_their_modules(init, '"""Files: layout, then a scan."""\npickle_scan = 1', modules)) == 1


def test_undocumented_public_names_are_found() -> None:
    module = types.ModuleType("module")
    module.__dict__.update({"__all__": ["bare", "missing", "LIMIT_BYTES"], "bare": lambda: None, "LIMIT_BYTES": 1})
    assert public_names_are_documented(module) == [
        "module.bare: has no docstring",
        "module.missing: is in __all__ and does not exist",
    ]


def test_public_name_of_a_module_is_found() -> None:
    module = types.ModuleType("module")
    module.__dict__["__all__"] = ["load", "layout"]
    assert len(public_names_are_no_modules(module, {"layout", "loading"})) == 1
