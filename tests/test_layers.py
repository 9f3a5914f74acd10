"""The table of rooms and floors, held by reading every import.

Lower floors only, no sibling, vendors in their own room. Files and functions are short, those of
the tests too, and no test imports a private name.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "milescli"
OF_OTHERS = {ROOT / "bench/gpu/parts", ROOT / "bench/gpu/site"}
"""Packages, where bench/gpu/pack.sh and unpack.sh have run."""

FLOORS = {
    "core": 0,
    "models": 1,
    "recipe": 1,
    "platform": 1,
    "console": 1,
    "workers": 1,
    "plan": 2,
    "data": 2,
    "sandbox": 2,
    "rollout": 3,
    "train": 3,
    "weights": 3,
    "checkpoint": 3,
    "backends.sglang": 4,
    "backends.megatron": 4,
    "backends.ray": 4,
    "backends.transformers": 4,
    "backends.hub": 4,
    "backends.stores": 4,
    "export": 4,
    "insight": 4,
    "autopsy": 4,
    "profiling": 4,
    "agents": 4,
    "trackers": 4,
    "conversion": 5,
    "cluster": 5,
    "jobs": 5,
    "report": 5,
    "simulate": 5,
    "runtime": 6,
    "doctor": 7,
    "web": 7,
    "listings": 7,
    "sweep": 7,
    "commands": 8,
}
"""Room -> floor. A room imports from lower floors, and from nothing of its own floor but itself."""

OWNERS = {
    "sglang": ("backends.sglang",),
    "megatron": ("backends.megatron",),
    "ray": ("backends.ray",),
    "huggingface_hub": ("backends.hub",),
    "fsspec": ("backends.stores",),
    "rich": ("console",),
    "typer": ("commands",),
    "prometheus_client": ("trackers",),
    "wandb": ("trackers",),
    "mlflow": ("trackers",),
    "trackio": ("trackers",),
    "opentelemetry": ("trackers",),
    "pydantic": ("recipe",),
    "simpy": ("simulate",),
    "optuna": ("sweep",),
    "torch": (
        "models",
        "platform",
        "train",
        "weights",
        "checkpoint",
        "backends.sglang",
        "backends.megatron",
        "backends.ray",
        "backends.transformers",
        "export",
        "trackers",
        "conversion",
        "runtime",
        "doctor",
    ),
}
"""What comes from outside -> the only rooms that may import it."""

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One module that one line asks for."""

    module: str
    line: int


def room_of(module: str) -> str | None:
    """`milescli.backends.ray.host` -> `backends.ray`; None for the package itself and its
    `__main__`."""
    parts = module.split(".")[1:]
    if not parts or parts[0] == "__main__":
        return None
    return ".".join(parts[:2]) if parts[0] == "backends" else parts[0]


def module_of(file: Path, package: Path = PACKAGE) -> str:
    """Dotted name of a source file."""
    parts = file.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(tree: ast.AST, module: str, is_package: bool) -> Iterator[Import]:
    """Every import of a file, inside functions too; those for type checkers alone included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Import(module=alias.name, line=node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")
                kept = parents[: len(parents) - node.level + (1 if is_package else 0)]
                base = ".".join([*kept, *([node.module] if node.module else [])])
            if base in ("milescli", "milescli.backends"):
                yield from (
                    Import(module=f"{base}.{alias.name}", line=node.lineno) for alias in node.names
                )
            else:
                yield Import(module=base, line=node.lineno)


def offences_of(text: str, *, module: str, is_package: bool = False) -> list[str]:
    """What a source file does that its room may not do, each with its line."""
    tree, room, offences = ast.parse(text, filename=module), room_of(module), []
    for item in imports_of(tree, module, is_package):
        top = item.module.split(".")[0]
        if top == "milescli":
            offences += _climbs(room, room_of(item.module), item)
        elif top in OWNERS and room is not None and room not in OWNERS[top]:
            offences.append(
                f"{item.line}: {room} imports {item.module}; only {', '.join(OWNERS[top])} may"
            )
    return offences + _too_long(text, tree)


def offences_of_test(text: str, *, module: str) -> list[str]:
    """What a file of the tests or benchmarks does that it may not do, each with its line."""
    tree = ast.parse(text, filename=module)
    return _too_long(text, tree) + [
        f"{node.lineno}: imports {node.module}.{alias.name}, which is private"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name.startswith("_") and not alias.name.endswith("__")
    ]


def _climbs(room: str | None, other: str | None, item: Import) -> list[str]:
    if room is None or other is None or room == other or other.startswith("__"):
        return []
    if other not in FLOORS:
        return [f"{item.line}: {item.module} is in no room of the table"]
    if FLOORS[other] < FLOORS[room]:
        return []
    where = "a sibling" if FLOORS[other] == FLOORS[room] else "a higher floor"
    return [
        f"{item.line}: {room} (floor {FLOORS[room]}) imports {item.module}, {where} (floor "
        f"{FLOORS[other]})"
    ]


def _too_long(text: str, tree: ast.AST) -> list[str]:
    offences = []
    num_lines = len(text.splitlines())
    if num_lines > MAX_FILE_LINES:
        offences.append(
            f"{num_lines}: the file has {num_lines} lines, {MAX_FILE_LINES} are allowed"
        )
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                offences.append(
                    f"{node.lineno}: {node.name} has {length} lines, {MAX_FUNCTION_LINES} are "
                    "allowed"
                )
    return offences


def test_every_room_is_in_the_table() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()} - {
        "backends"
    }
    backends = {
        f"backends.{path.name}"
        for path in (PACKAGE / "backends").iterdir()
        if (path / "__init__.py").exists()
    }
    assert folders | backends == set(FLOORS)


def test_no_file_breaks_the_rules_of_its_room() -> None:
    offences = []
    for file in sorted(PACKAGE.rglob("*.py")):
        of_file = offences_of(
            file.read_text(encoding="utf-8"),
            module=module_of(file),
            is_package=file.name == "__init__.py",
        )
        offences += [f"{file.relative_to(ROOT)}:{offence}" for offence in of_file]
    assert not offences, "\n" + "\n".join(offences)


def test_tests_are_short_and_import_nothing_private() -> None:
    offences = [
        f"{file.relative_to(ROOT)}:{offence}"
        for folder in ("tests", "bench")
        for file in sorted((ROOT / folder).rglob("*.py"))
        if not OF_OTHERS & {*file.parents}
        for offence in offences_of_test(file.read_text(encoding="utf-8"), module=file.stem)
    ]
    assert not offences, "\n" + "\n".join(offences)


def test_every_file_says_on_its_first_line_what_it_is() -> None:
    silent = [
        str(file.relative_to(ROOT))
        for file in sorted(PACKAGE.rglob("*.py"))
        if (text := file.read_text(encoding="utf-8")).strip()
        and not text.startswith(('"""', 'r"""'))
    ]
    assert not silent, silent


@pytest.mark.parametrize(
    ("module", "source", "refused"),
    [
        ("milescli.plan.make", "from milescli.runtime.loop import run", "higher floor"),
        (
            "milescli.recipe.load",
            "def f():\n    from milescli.console import output",
            "2: recipe (floor 1) imports milescli.console, a sibling",
        ),
        ("milescli.runtime.loop", "import ray", "1: runtime imports ray"),
        ("milescli.backends.sglang.fleet", "from milescli.backends.ray import host", "sibling"),
        ("milescli.backends.sglang.fleet", "from milescli.backends import ray", "sibling"),
        ("milescli.plan.make", "import torch.nn", "plan imports torch.nn"),
        ("milescli.runtime.loop", "from rich.table import Table", "only console may"),
        ("milescli.plan.make", "from ..runtime import loop", "higher floor"),
        ("milescli.plan.make", "def f():\n" + "    pass\n" * 80, "f has 81 lines"),
        ("milescli.plan.make", "x = 1\n" * 601, "601 lines"),
        ("milescli.plan.make", "from milescli.attic import old", "in no room"),
    ],
)
def test_the_walk_finds_what_it_is_for(module: str, source: str, refused: str) -> None:
    assert any(refused in offence for offence in offences_of(source, module=module)), offences_of(
        source, module=module
    )


@pytest.mark.parametrize(
    ("source", "refused"),
    [
        ("x = 1\n" * 601, "601 lines"),
        ("def f():\n    from milescli.plan.make import _search", "2: imports milescli.plan.make._"),
        ("from tests.plan.recipes import _small as small", "recipes._small, which is private"),
    ],
)
def test_the_walk_over_the_tests_finds_what_it_is_for(source: str, refused: str) -> None:
    assert any(refused in offence for offence in offences_of_test(source, module="test_x"))
    assert offences_of_test("from milescli import __version__", module="test_x") == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("milescli.plan.make", "from milescli.recipe.schema import Recipe"),
        ("milescli.backends.ray.host", "import ray.util"),
        ("milescli.commands.launch", "from milescli import __version__"),
        ("milescli.console.live", "from milescli.console import theme"),
    ],
)
def test_the_walk_lets_pass_what_is_allowed(module: str, source: str) -> None:
    assert offences_of(source, module=module) == []
