"""The rules of docs/architecture.md that no linter knows: layers, sizes, docstrings, no state."""

import ast
import functools
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]

# Who may import whom, downwards only; `server` sees three modules of the scheduler.
MAY_IMPORT = {
    "server": {"scheduler", "configs"},
    "scheduler": {"model", "attention", "kv_cache", "configs"},
    "model": {"attention", "kv_cache", "configs"},
    "attention": {"kv_cache", "configs"},
    "kv_cache": {"configs"},
    "configs": set(),
}
SERVER_SEES = {"messages", "process", "stats"}
SOURCES = sorted(path for package in MAY_IMPORT for path in (ROOT / package).rglob("*.py"))


def each_source(check: Callable[[Path], None]) -> Callable[[], None]:
    """A test that all files pass; it names those that do not, each with what is wrong there.

    One for each file and rule would be two thousand tests, which take seconds to hand out.
    """

    def test() -> None:
        problems = []
        for path in SOURCES:
            try:
                check(path)
            except AssertionError as problem:
                problems.append(f"{path.relative_to(ROOT)}: {problem}")
        assert not problems, "\n".join(problems)

    test.__doc__ = check.__doc__
    return test


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """All of a file's nodes, the module first."""
    return list(ast.walk(ast.parse(path.read_text())))


def tree(path: Path) -> ast.Module:
    first = nodes(path)[0]
    assert isinstance(first, ast.Module)
    return first


def imported_modules(path: Path) -> list[tuple[str, ...]]:
    """Project modules a file imports, as paths from the root; typing-only imports count too."""
    package = path.relative_to(ROOT).parent.parts
    found = []
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            module = (*base, *(node.module or "").split("."))
            if node.module and len(module) > 1:
                found.append(module)
            else:
                found.extend((*(p for p in module if p), alias.name) for alias in node.names)
    return found


@each_source
def test_imports_point_downwards(path):
    package = path.relative_to(ROOT).parts[0]
    for module in imported_modules(path):
        if module[0] == package:
            continue
        assert module[0] in MAY_IMPORT[package], f"{package} imports {'.'.join(module)}"
        if package == "server" and module[0] == "scheduler":
            assert module[1] in SERVER_SEES, f"server imports {'.'.join(module)}"


@each_source
def test_files_are_short_and_say_why_they_exist(path):
    text = path.read_text()
    limit = 400 if "kernels" in path.parts else 300
    assert len(text.splitlines()) <= limit
    assert ast.get_docstring(tree(path)), "a file begins with a docstring"


@each_source
def test_init_files_hold_a_docstring_only(path):
    if path.name == "__init__.py":
        assert len(tree(path).body) == 1


@each_source
def test_no_guessing_at_configuration(path):
    """A missing key is an error that names it, so nobody reads settings through getattr."""
    for node in nodes(path):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in {"getattr", "hasattr"} and node.args:
                assert "config" not in ast.unparse(node.args[0]).lower(), f"line {node.lineno}"
            assert node.func.id not in {"eval", "exec"}, f"line {node.lineno}"


@each_source
def test_no_pickle(path):
    for node in nodes(path):
        if isinstance(node, ast.Import):
            assert not {a.name for a in node.names} & {"pickle", "dill", "cloudpickle"}
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            raise AssertionError(f"torch.load at line {node.lineno}")


@each_source
def test_no_vague_names(path):
    assert path.stem not in {"utils", "util", "helpers", "common", "misc"}
    for node in nodes(path):
        if isinstance(node, ast.ClassDef):
            assert not node.name.endswith(("Manager", "Base", "Helper")), node.name


@each_source
def test_no_mutable_state_at_module_level(path):
    for node in tree(path).body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            value = node.value
            mutable = isinstance(value, ast.List | ast.Set | ast.ListComp | ast.SetComp)
            assert not mutable, f"line {node.lineno}: use a tuple or a frozenset"


# Where a moment is told to people: creation times, log lines, traces, names of files.
STAMPS = {
    "server/commands.py",
    "server/tracing.py",
    "server/service.py",
    "server/chat_answer.py",
    "server/chat_template.py",
    "server/completion_answer.py",
    "server/responses_api/answer.py",
    "scheduler/profiling.py",
}
WALL_CLOCK = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today"}


@each_source
def test_ops_15_only_stamps_read_the_wall_clock(path):
    """Waiting times and deadlines do not move when somebody sets the clock."""
    names = (node for node in nodes(path) if isinstance(node, ast.Attribute))
    read = {ast.unparse(name) for name in names} & WALL_CLOCK
    assert not read or str(path.relative_to(ROOT)) in STAMPS
