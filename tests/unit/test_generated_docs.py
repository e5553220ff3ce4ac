"""What the docs list is what the code has: files, settings, metrics, error codes.

The lists are made from the sources; `make docs` writes them anew.
"""

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from prometheus_client import CollectorRegistry

from minidsa.configs.server import ServerConfig
from minidsa.scheduler.messages import DraftStats, EngineStats, SelectionStats
from minidsa.server.errors import ApiError
from minidsa.server.flag_table import FLAGS
from minidsa.server.metrics import Metrics

ROOT = Path(__file__).parents[2]
PACKAGES = ("server", "scheduler", "model", "attention", "kv_cache", "configs")
API, FILES, SETTINGS = (ROOT / "docs" / f"{name}.md" for name in ("api", "files", "settings"))
TOP = """# Every file

One line each, in the order of the layers; `make docs` writes this page from the files' docstrings.
[architecture.md](architecture.md) says how they work together.
"""

SETTINGS_TOP = """# Every setting

`minidsa serve --set limits.max_body_bytes=1000000`, or in the file of `--config`:

```toml
[limits]
max_body_bytes = 1000000
```

Settings with a flag of their own can be given by either. Where the default is empty there is none,
or the server chooses: it prints what, and why, when it starts. `make docs` writes this page from
`configs/`.

| setting | flag | default | what it is |
|---|---|---|---|
"""


def file_list() -> str:
    """docs/files.md."""
    lines = [TOP]
    for package in PACKAGES:
        lines += [f"\n## {package}\n", "| file | |", "|---|---|"]
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.name != "__init__.py":
                said = ast.get_docstring(ast.parse(path.read_text())) or ""
                first = " ".join(said.partition("\n\n")[0].split()).replace("|", "\\|")
                lines.append(f"| `{path.relative_to(ROOT)}` | {first} |")
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


def settings_list() -> str:
    """docs/settings.md."""
    return SETTINGS_TOP + "".join(f"| {' | '.join(row)} |\n" for row in _settings(ServerConfig, ""))


def _settings(config: type, prefix: str) -> Iterator[tuple[str, str, str, str]]:
    body: Any = ast.parse(inspect.getsource(config)).body[0]
    said = {
        ast.unparse(field.target): " ".join(ast.literal_eval(text.value).split())
        for field, text in zip(body.body, body.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }
    flags = {flag.target: flag for flag in FLAGS}
    hints = get_type_hints(config)
    for field in fields(config):
        path = prefix + field.name
        if is_dataclass(hints[field.name]):
            yield from _settings(hints[field.name], f"{path}.")
            continue
        flag = flags.get(path)
        text = said.get(field.name) or (f"{flag.help[0].upper()}{flag.help[1:]}." if flag else "")
        assert text, f"{path} has no docstring"
        if choices := _choices(hints[field.name]):
            text += f" ({', '.join(map(str, choices))})"
        default = "" if field.default in (None, "") else f"`{field.default}`".lower()
        yield f"`{path}`", f"`{flag.name}`" if flag else "", default, text.replace("|", "\\|")


def _choices(hint: Any) -> list[Any]:
    """The values of a Literal, also within others and beside None."""
    found: list[Any] = []
    for argument in get_args(hint):
        found += _choices(argument) if get_args(argument) else [argument]
    return [value for value in found if not isinstance(value, type)]


def metric_table() -> str:
    """The table of docs/api.md, of a server that drafts and so has all of them."""
    stats = EngineStats(drafts=DraftStats(1, 1, 1, [1], 1), selection=SelectionStats(1, 1.0, 1, 1))
    metrics = Metrics("model", lambda: stats)
    metrics.describe_cache(page_size=16, num_pages=9, dtype="fp8", prefix_reuse=True)
    metrics.count_http("/health", 200)
    registry: CollectorRegistry = metrics._registry
    rows = ["| metric | kind | what it counts |", "|---|---|---|"]
    for family in sorted(registry.collect(), key=lambda family: family.name):
        suffix = "_total" if family.type == "counter" else ""
        labels = sorted({name for sample in family.samples for name in sample.labels})
        names = [name for name in labels if name not in ("le", "model_name")]
        more = f", by {', '.join(names[:-1])} and {names[-1]}" if names[1:] else ""
        more = more or (f", by {names[0]}" if names else "")
        rows.append(f"| `{family.name}{suffix}` | {family.type} | {family.documentation}{more} |")
    return "\n".join(rows) + "\n"


def written_table() -> str:
    """The table as it stands in docs/api.md."""
    found = re.search(r"(?m)^\| metric \|(?:.*\n)(?:\|.*\n)+", API.read_text())
    assert found is not None, "docs/api.md has no table of metrics"
    return found.group()


def test_every_file_is_listed_with_what_it_is_for():
    assert FILES.read_text() == file_list(), "run `make docs`"


def test_every_setting_is_listed():
    assert SETTINGS.read_text() == settings_list(), "run `make docs`"


def test_every_metric_is_listed():
    assert written_table() == metric_table(), "run `make docs`"


def test_every_error_code_and_status_is_in_the_docs():
    _, _, text = API.read_text().partition("## Errors")
    section = text.partition("\n## ")[0]
    codes, statuses = set(), set()
    for path in (ROOT / "server").rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and ast.unparse(call.func).endswith(ApiError.__name__):
                if call.args and isinstance(call.args[0], ast.Constant):
                    statuses.add(str(call.args[0].value))
                codes |= {
                    word.value.value
                    for word in call.keywords
                    if word.arg == "code" and isinstance(word.value, ast.Constant)
                }
    assert len(codes) > 15 and len(statuses) > 8
    assert {code for code in codes if f"`{code}`" not in section} == set()
    assert {status for status in statuses if f"| {status} |" not in section} == set()


if __name__ == "__main__":
    FILES.write_text(file_list())
    SETTINGS.write_text(settings_list())
    API.write_text(API.read_text().replace(written_table(), metric_table()))
