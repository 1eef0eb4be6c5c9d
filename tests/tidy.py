"""The project's rules, as functions: each takes the root of a tree and yields the breaches it finds.

What always holds: each exception to a rule is in a list here, with its reason. A rule reads files and imports none of
the checked modules. `tests/test_tidy.py` runs each on this tree, and on a tree with a planted breach.

What it doesn't do: judge style that ruff and mypy judge already.
"""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = ["RULES", "Breach", "forget_trees"]

Breach = str
LINES_MAX = 600
PACKAGES = ("kvcli", "kvstore", "nic_offload", "sim")
BESIDE = ("benchmarks", "tests", "tools")

# What each package may import of this project, beside itself; types count too. "kvstore" is its modules at the top.
_BASE = {"kvcli", "kvstore", "kvstore.wire", "nic_offload"}
LAYERS = {
    "kvcli": set(),
    "sim": {"kvcli"},
    "nic_offload": set(),
    "kvstore": _BASE,
    "kvstore.wire": _BASE,
    "kvstore.storage": _BASE,
    "kvstore.cluster": _BASE,
    "kvstore.sealing": _BASE,
    "kvstore.node": {*_BASE, "kvstore.cluster", "kvstore.sealing", "kvstore.storage"},
    "kvstore.client": {*_BASE, "kvstore.cluster"},
    "kvstore.engines": {*_BASE, "kvstore.client"},
    "kvstore.commands": {*_BASE, "kvstore.client", "kvstore.cluster", "kvstore.sealing", "kvstore.storage"},
    "kvstore.demo": {*_BASE, "kvstore.client", "kvstore.commands", "kvstore.engines"},
    "kvstore.testing": {*_BASE, "kvstore.client", "kvstore.demo", "kvstore.node", "kvstore.storage"},
    "kvstore.bench": {*_BASE, "kvstore.client", "kvstore.demo", "kvstore.storage"},
}
LAYERS_ALLOWED = {
    "kvstore/__init__.py": "the front door: names of the client's, loaded when they are first used",
    "kvstore/cli.py": "the command: it imports what it calls",
    "kvstore/config.py": "it makes the settings of the node, of its drives and of its cluster out of text",
    "kvstore/serve_options.py": "the same, for the options of the command",
}
BENCHMARKS_USED_BY = {
    "benchmarks/": "they share their form and their ceilings",
    "tests/benchmarks/": "it tests them",
    "tools/profile_node.py": "it profiles a node under the load of one",
}
BENCHMARKS_USE = ("tests.engines.",)  # of the tests: real engines, and nothing else
NAMES_ALLOWED = {
    "__init__.py": "Python's name for a package",
    "__main__.py": "Python's name for what `python -m` runs",
    "_build.py": "each builds the C of its own folder",
    "cli.py": "each is the entry of one command",
    "connector.py": "engines are told the module's path, and call it a connector",
    "errors.py": "one error tree, in two packages",
}
C_LINES_MAX = 400
BOUND = re.compile(
    r"^_?(?:(?!\w*_PER_)[A-Z][A-Z0-9_]*_(?:MAX|MIN|MS|NS|S|A_ROUND)"
    r"|(?:[A-Z0-9_]+_)?(?:AT_ONCE|BATCH(?:_[A-Z]+)?|STEPS|THREADS|TRIES))$"
)
UNITS = {"_SECOND_NS"}
BUFFER_BYTES_MIN = 64 << 10  # a constant of more bytes is the size of a buffer, and none of a format
NAMED_SIZES = {"PART_BYTES", "_PIECE_BYTES"}  # part of blocks' names, so they never change
BOUNDS_ALLOWED = {
    "kvstore/bench/": "how much it moves and how long it waits is part of the measurement",
    "kvstore/commands/probes.py": "the same: doctor's measurement of a drive",
    "kvstore/demo/": "the same: it demonstrates, and no service depends on it",
    "kvstore/testing/": "the same: the sizes of nodes for tests",
}
CLOCK_ALLOWED = {
    "kvstore/clock.py": "it is the seam",
    "kvstore/commands/probes.py": "it measures a drive, and no decision depends on the time",
    "kvstore/client/core.py": "its timeouts are its caller's, in real seconds",
    "kvstore/client/fabric_transport.py": "the same: deadlines of its caller's",
    "kvstore/client/puts.py": "the same: a wait of the caller's on a condition",
    "kvstore/bench/": "it measures real processes and a real drive",
    "kvstore/demo/": "it measures real processes and shows what it measured",
    "kvcli/progress.py": "its bar says how long a command will still take; no result depends on it",
    "nic_offload/": "it stands below the seam; it waits for its own C threads with a bound",
}
ENVIRONMENT_ALLOWED = {
    "kvstore/config.py": "the one parser of a node's settings",
    "kvstore/reach.py": "the one reader of how a client reaches its nodes",
    "nic_offload/library.py": "TRIGGERKV_LIBFABRIC and IPATH_NO_BACKTRACE count before there is a config",
}
CLOCK_CALLS = {"time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "sleep"}
WALL_CALLS = {"now", "utcnow", "today"}
_BUILT = ("build/", "dist/")


def _is_ours(part: str) -> bool:
    return not part.startswith(".") or part == ".ci"


def _files(root: Path, *patterns: str) -> Iterator[tuple[str, Path]]:
    """Files of the tree with their names relative to it, without hidden and generated ones."""
    for pattern in patterns:
        for path in sorted(root.glob(pattern)):
            name = path.as_posix().removeprefix(f"{root.as_posix()}/")
            generated = "_pb2" in name or name.startswith(_BUILT) or ".egg-info/" in name
            if (
                not generated
                and "__pycache__" not in name
                and all(map(_is_ours, name.split("/")))
                and path.is_file()
            ):
                yield name, path


@lru_cache(maxsize=2048)
def _parsed(name: str, text: str) -> ast.Module:
    """Parsed once for all rules, which change nothing."""
    return ast.parse(text, name)


@lru_cache(maxsize=2048)
def _nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    """All nodes of a tree, at any depth; listed once for all rules."""
    return tuple(ast.walk(tree))


def forget_trees() -> None:
    """Free the parsed modules."""
    _parsed.cache_clear()
    _nodes.cache_clear()


def _modules(
    root: Path, *packages: str, without: re.Pattern[str] | None = None, having: re.Pattern[str] | None = None
) -> Iterator[tuple[str, ast.Module]]:
    """Parsed modules, except those that lack `having` or begin with `without`, which can't break the rule."""
    for name, path in _files(root, *(f"{package}/**/*.py" for package in packages)):
        text = path.read_text()
        if (having is None or having.search(text)) and (without is None or not without.match(text)):
            yield name, _parsed(name, text)


def _allowed(name: str, allowed: dict[str, str]) -> bool:
    return any(name == entry or (entry.endswith("/") and name.startswith(entry)) for entry in allowed)


def _imported(name: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and full name of each import, anywhere in a module; relative ones are resolved."""
    for node in _nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(name.split("/")[: -node.level] if node.level else [])
            yield node.lineno, ".".join(part for part in (base, node.module) if part)


def _layer(module: str) -> str:
    """The layer of a module by its dotted name; "" for one that is not ours."""
    parts = module.split(".")
    under = ".".join(parts[:2])
    return under if under in LAYERS else parts[0] if parts[0] in {*LAYERS, *BESIDE} else ""


def imports_run_one_way(root: Path) -> Iterator[Breach]:
    """A package imports what LAYERS says, and no module imports benchmarks, tests or tools."""
    for name, tree in _modules(root, *PACKAGES):
        layer = _layer(name.removesuffix(".py").replace("/", "."))
        for line, module in _imported(name, tree):
            other = _layer(module)
            is_stranger = other in BESIDE or not _allowed(name, LAYERS_ALLOWED)
            if other and other != layer and other not in LAYERS[layer] and is_stranger:
                yield f"{name}:{line}: {layer} must not import {module}"


def benchmarks_stand_apart(root: Path) -> Iterator[Breach]:
    """Only the modules in BENCHMARKS_USED_BY import benchmarks, which import of the tests only `tests.engines`."""
    for name, tree in _modules(root, *BESIDE, "examples"):
        for line, module in _imported(name, tree):
            top = module.split(".")[0]
            if top == "benchmarks" and not _allowed(name, BENCHMARKS_USED_BY):
                yield f"{name}:{line}: only benchmarks, and what tests them, import {module}"
            elif top == "tests" and name.startswith("benchmarks/") and not module.startswith(BENCHMARKS_USE):
                yield f"{name}:{line}: benchmarks must not import {module}"


def no_pickle(root: Path) -> Iterator[Breach]:
    """Data from a peer or a drive is never executed."""
    banned = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve"}
    words = re.compile("|".join(banned))
    for name, tree in _modules(root, *PACKAGES, *BESIDE, having=words):
        for line, module in _imported(name, tree):
            if module.split(".")[0] in banned:
                yield f"{name}:{line}: {module} is banned"


def no_builtin_hash(root: Path) -> Iterator[Breach]:
    """Python's hash() differs between processes. A `__hash__` method may use it: it stays in its process."""
    for name, tree in _modules(root, *PACKAGES):
        inside = {
            id(call)
            for node in _nodes(tree)
            if isinstance(node, ast.FunctionDef) and node.name == "__hash__"
            for call in ast.walk(node)
        }
        for node in _nodes(tree):
            if not isinstance(node, ast.Call) or id(node) in inside:
                continue
            if isinstance(node.func, ast.Name) and node.func.id == "hash":
                yield f"{name}:{node.lineno}: hash() is banned; keys are BLAKE2b"


def time_only_through_the_clock(root: Path) -> Iterator[Breach]:
    """The store reads time only through kvstore.clock, so that tests can stop it."""
    for name, tree in _modules(root, *PACKAGES):
        if _allowed(name, CLOCK_ALLOWED):
            continue
        for node in _nodes(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "time":
                yield f"{name}:{node.lineno}: time is taken through kvstore.clock"
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                of_time = node.value.id == "time" and node.attr in CLOCK_CALLS
                of_wall = node.value.id in {"datetime", "date"} and node.attr in WALL_CALLS
                if of_time or of_wall:
                    yield f"{name}:{node.lineno}: {node.value.id}.{node.attr} is taken through kvstore.clock"


def no_bare_except(root: Path) -> Iterator[Breach]:
    """A bare `except` also catches what ends the process."""
    bare = re.compile(r"\bexcept[\s\\]*:")
    for name, tree in _modules(root, *PACKAGES, *BESIDE, having=bare):
        for node in _nodes(tree):
            if isinstance(node, ast.ExceptHandler) and node.type is None:
                yield f"{name}:{node.lineno}: bare except"


def environment_only_in_config(root: Path) -> Iterator[Breach]:
    """Settings come from one parser, not from wherever somebody reads the environment."""
    words = {"environ", "getenv", "putenv", "environb"}
    for name, tree in _modules(root, *PACKAGES):
        if _allowed(name, ENVIRONMENT_ALLOWED):
            continue
        for node in _nodes(tree):
            line = None
            if isinstance(node, ast.Attribute) and node.attr in words:
                line = node.lineno
            elif isinstance(node, ast.ImportFrom) and node.module == "os":
                line = node.lineno if any(alias.name in words for alias in node.names) else None
            if line is not None:
                yield f"{name}:{line}: the environment is read in kvstore/config.py"


def nothing_left_undone(root: Path) -> Iterator[Breach]:
    """No unfinished code: what is not implemented is listed in the README's status."""
    words = re.compile("Not" + r"ImplementedError|\bTO" + r"DO\b|\bFIX" + r"ME\b|\bXX" + "X\b")
    patterns = [f"{top}/**/*.{end}" for top in (*PACKAGES, *BESIDE) for end in ("py", "c", "h", "sh")]
    for name, path in _files(root, *patterns):
        whole = path.read_text()
        if not words.search(whole):
            continue
        for line, text in enumerate(whole.splitlines(), 1):
            if found := words.search(text):
                yield f"{name}:{line}: {found[0]}"


def a_name_has_one_meaning(root: Path) -> Iterator[Breach]:
    """No two modules have the same file name, except tests, which are named after what they test."""
    first: dict[str, str] = {}
    for name, path in _files(
        root, *(f"{top}/**/*.py" for top in (*PACKAGES, "benchmarks", "examples", "tools"))
    ):
        if path.name in NAMES_ALLOWED:
            continue
        if path.name in first:
            yield f"{name}: {first[path.name]} has this name already"
        first.setdefault(path.name, name)


def modules_have_docstrings(root: Path) -> Iterator[Breach]:
    """Each module has a docstring, except an empty `__init__`."""
    begins = re.compile(r'(?:\s*#[^\n]*\n)*\s*r?"""[^"\s][^"]*"""\n')
    for name, tree in _modules(root, *PACKAGES, *BESIDE, without=begins):
        if tree.body and not ast.get_docstring(tree):
            yield f"{name}: no docstring"


def _public_names(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return {name for name in names if not name.startswith("_")}


def _bound_names(tree: ast.Module) -> set[str]:
    lazy = any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in tree.body)
    nodes = _nodes(tree) if lazy else tree.body  # a lazy module imports for type checkers only
    imports = [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))]
    return _public_names(tree) | {alias.asname or alias.name for node in imports for alias in node.names}


def _is_future(node: ast.AST) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def all_says_what_is_public(root: Path) -> Iterator[Breach]:
    """`__all__` names existing things only, and every class and function without an underscore.

    Constants may stay unlisted, and a module of nothing else needs no `__all__`.
    """
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for name, tree in _modules(root, *PACKAGES):
        listed = None
        for node in tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            named = any(getattr(target, "id", "") == "__all__" for target in targets)
            if named and isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
                listed = set(ast.literal_eval(node.value))
        if listed is None:
            if any(isinstance(node, (*kinds, ast.ImportFrom)) and not _is_future(node) for node in tree.body):
                yield f"{name}: no __all__"
            continue
        defined = {node.name for node in tree.body if isinstance(node, kinds) and node.name[0] != "_"}
        for missing in sorted(defined - listed):
            yield f"{name}: {missing} is public and not in __all__"
        for unknown in sorted(listed - _bound_names(tree)):
            yield f"{name}: __all__ names {unknown}, which is not there"


def files_are_short(root: Path) -> Iterator[Breach]:
    """The aim is about 400 lines; this is the maximum."""
    patterns = [f"{top}/**/*.py" for top in (*PACKAGES, *BESIDE)]
    for name, path in _files(root, *patterns):
        lines = path.read_text().count("\n")
        if lines > LINES_MAX:
            yield f"{name}: {lines} lines, at most {LINES_MAX}"


def c_files_are_short(root: Path) -> Iterator[Breach]:
    """C files have a maximum length too."""
    generated = (
        "nic_offload/_core.c",
        "kvstore/storage/_uring.c",
        "kvstore/storage/keep/_keep.c",
        "sim/replay/_events.c",
    )
    for name, path in _files(root, *(f"{top}/**/*.{end}" for top in (*PACKAGES, *BESIDE) for end in "ch")):
        lines = path.read_text().count("\n")
        if lines > C_LINES_MAX and name not in generated:
            yield f"{name}: {lines} lines, at most {C_LINES_MAX}"


def _bytes_of(value: ast.expr) -> int:
    """The number in an expression such as `4 << 20`; the largest one in any other."""
    numbers = [
        one.value for one in ast.walk(value) if isinstance(one, ast.Constant) and isinstance(one.value, int)
    ]
    is_shift = isinstance(getattr(value, "op", None), ast.LShift) and len(numbers) == 2
    return numbers[0] << numbers[1] if is_shift else max(numbers, default=0)


def _is_bound(name: str, *, is_buffer: bool) -> bool:
    is_size = is_buffer and name.endswith("_BYTES") and name not in NAMED_SIZES
    return name not in UNITS and (is_size or BOUND.match(name) is not None)


def bounds_are_in_limits(root: Path) -> Iterator[Breach]:
    """Numeric bounds, and the sizes of caches, are in kvstore/limits.py, beside the bounds that they depend on."""
    for name, tree in _modules(root, "kvstore"):
        if name == "kvstore/limits.py" or _allowed(name, BOUNDS_ALLOWED):
            continue
        for node in tree.body:
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            names = [getattr(one, "id", "") for one in getattr(target, "elts", [target])]
            value = getattr(node, "value", None)
            is_buffer = value is not None and _bytes_of(value) >= BUFFER_BYTES_MIN
            bound = next((one for one in names if _is_bound(one, is_buffer=is_buffer)), None)
            if bound is None or value is None:
                continue
            parts = [
                getattr(part, "value", None) for part in ast.walk(value) if not isinstance(part, ast.operator)
            ]
            is_number = any(isinstance(part, (int, float)) for part in parts)
            if is_number and not any(isinstance(part, ast.Name) for part in ast.walk(value)):
                yield f"{name}:{node.lineno}: {bound} belongs in kvstore/limits.py"
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "lru_cache":
                sizes = [*call.args, *(one.value for one in call.keywords)]
                if any(isinstance(size, ast.Constant) for size in sizes):
                    yield f"{name}:{call.lineno}: the size of a cache belongs in kvstore/limits.py"


def no_file_is_dead(root: Path) -> Iterator[Breach]:
    """Each module is imported or named somewhere, each tool is called, and each C file is built or included."""
    sources = {
        name: path.read_text()
        for name, path in _files(
            root,
            *(
                f"{top}/**/*.{end}"
                for top in (*PACKAGES, *BESIDE, "examples")
                for end in ("py", "c", "h", "sh")
            ),
            *("Makefile", "*.toml", "setup.py", ".ci/*", "deploy/**/*", "docs/**/*.md", "*.md"),
        )
    }
    packages = (*PACKAGES, "benchmarks")
    words = {name: set(re.findall(r"[\w./-]*\w", text)) for name, text in sources.items()}
    for name in sources:
        stem = re.sub(r"\.\w+$", "", name)
        folder, _, short = stem.rpartition("/")
        if name.endswith(".py") and name.startswith(packages) and not short.startswith(("__", "bench_")):
            names = {stem.replace("/", "."), name}
            imported = re.compile(rf"from {folder.replace('/', '.')} import [^\n]*\b{short}\b")
        elif name.startswith("tools/") and not short.startswith("__"):
            names, imported = {name, stem.replace("/", ".")}, None
        elif name.endswith((".c", ".h")) and name.startswith(packages):
            names, imported = {short, f"{short}.h", f"{short}.c", name}, None
        else:
            continue
        others = (other for other in sources if other != name)
        if not any(names & words[one] or (imported and imported.search(sources[one])) for one in others):
            yield f"{name}: not used by any other file"


def no_path_of_somebodys_machine(root: Path) -> Iterator[Breach]:
    """No absolute path of a home or a workspace, in anything that is committed as text."""
    places = re.compile(r"(?<![\w.$}/])/(?:home|Users|root|work|workspace)/\w")
    folders = (f"{path.name}/" for path in root.iterdir() if path.is_dir() and _is_ours(path.name))
    for name, path in _files(root, "*", *(f"{one}**/*" for one in folders if one not in _BUILT)):
        if path.suffix in {".so", ".png", ".gz", ".whl", ".o"}:
            continue
        whole = path.read_text(errors="replace")
        if not places.search(whole):
            continue
        for line, text in enumerate(whole.splitlines(), 1):
            if found := places.search(text):
                yield f"{name}:{line}: {found[0]}..."


def proto_and_deploy_hold_no_python(root: Path) -> Iterator[Breach]:
    """A top-level `proto` package would break Google's proto-plus."""
    for name, _ in _files(root, "proto/**/*.py", "proto/**/*.pyi", "deploy/**/*.py"):
        yield f"{name}: no Python here"


def ci_makes_what_tests_need(root: Path) -> Iterator[Breach]:
    """What tests are skipped without, if `make` can fetch it, is made by `.ci/run` or for `make test`."""
    lists = {".ci/run": r"^make ([a-z -]+)", "Makefile": r"^test: ([a-z -]+)"}
    texts = {name: (root / name).read_text() for name in lists if (root / name).is_file()}
    made = {
        one
        for name in texts
        for row in re.findall(lists[name], texts[name], re.MULTILINE)
        for one in row.split()
    }
    for name, path in _files(root, "tests/**/*.py"):
        for tool in re.findall(r'"there is no [^"\n]*: make ([a-z-]+)"', path.read_text()):
            if tool not in made:
                yield f"{name}: .ci/run does not make {tool}, so these tests are skipped there"


def readme_links_lead_somewhere(root: Path) -> Iterator[Breach]:
    """Every file that the pages link to exists."""
    for name, path in _files(root, "*.md", "docs/**/*.md"):
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text()):
            if "://" not in target and not (path.parent / target).exists():
                yield f"{name}: links to {target}, which is not there"


RULES: tuple[Callable[[Path], Iterator[Breach]], ...] = (
    imports_run_one_way,
    benchmarks_stand_apart,
    no_pickle,
    no_builtin_hash,
    time_only_through_the_clock,
    no_bare_except,
    environment_only_in_config,
    nothing_left_undone,
    a_name_has_one_meaning,
    modules_have_docstrings,
    all_says_what_is_public,
    files_are_short,
    c_files_are_short,
    bounds_are_in_limits,
    no_file_is_dead,
    no_path_of_somebodys_machine,
    proto_and_deploy_hold_no_python,
    ci_makes_what_tests_need,
    readme_links_lead_somewhere,
)
