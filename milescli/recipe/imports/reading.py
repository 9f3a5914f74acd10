"""Reads a configuration of another framework into settings with their lines: a shell script, YAML
with Hydra's interpolation, TOML, or the call of a config class in Python. Nothing is run, imported
or fetched. Knows no framework's keys."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from milescli.core.errors import RecipeError
from milescli.recipe import layers, reader
from milescli.recipe.imports.launcher import is_launcher, read_launcher
from milescli.recipe.imports.shell import Command, Word, read_command

SHELL, YAML, TOML, PYTHON = (".sh", ".bash"), (".yaml", ".yml"), (".toml",), (".py",)
_INTERPOLATION = re.compile(r"\$\{([^{}]+)\}")
_FLAG = re.compile(r"--[A-Za-z][\w.-]*")
_OVERRIDE = re.compile(r"(?:\+{1,2}|~)?([A-Za-z_][\w./@-]*)=(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of another framework."""

    name: str
    value: Any
    where: str
    """`run.sh:12`, or whose default it is."""


@dataclass(slots=True)
class Foreign:
    """What files of another framework say."""

    form: str = ""
    """shell, yaml, toml or python"""
    program: str = ""
    """What a script runs: `verl.trainer.main_ppo`; the class that Python calls."""
    settings: dict[str, Setting] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    """What could not be read."""
    text: str = ""

    def add(self, name: str, value: Any, where: str) -> None:
        """The later of two counts."""
        self.settings[name] = Setting(name, value, where)

    def value(self, name: str, default: Any = None) -> Any:
        """Return the value of a key; the default where it is not set or null."""
        found = self.settings.get(name)
        return default if found is None or found.value is None else found.value

    def settings_below(self, name: str) -> dict[str, Any]:
        """Return the values of the keys below `name.`, by what follows it."""
        begin = f"{name}."
        return {
            key[len(begin) :]: one.value
            for key, one in self.settings.items()
            if key.startswith(begin)
        }


def read_files(paths: Sequence[Path], *, overrides: Sequence[str] = ()) -> Foreign:
    """Read files, of which later ones override earlier ones, then `overrides` (`a.b=c`). Raises
    RecipeError for a file that is none of these forms, or not valid in its form."""
    found, variables = Foreign(), dict[str, list[Word]]()
    for path in paths:
        if not path.exists():
            raise RecipeError(
                f"there is no file {path}",
                why="miles import reads files of another framework",
                fix=f"ls {path.parent}",
            )
        text = layers.read_text(path, what="configuration")
        found.text += text
        suffix = path.suffix.lower()
        if suffix in YAML:
            found.form = found.form or "yaml"
            _add_yaml(found, text, path)
        elif suffix in TOML:
            found.form = found.form or "toml"
            _add_toml(found, text, path.name)
        elif suffix in PYTHON:
            found.form = found.form or "python"
            _add_python(found, text, path.name, overrides)
        elif suffix in SHELL or text.startswith("#!"):
            found.form = found.form or "shell"
            _add_command(found, read_command(text, variables), path.name)
        else:
            raise RecipeError(
                f"miles cannot read {path} as a configuration",
                why="it reads shell scripts (.sh), YAML, TOML, and calls of a config class in "
                "Python (.py)",
                fix=f"mv {path} {path.with_suffix('.sh').name}   # if it is a shell script",
            )
    for word in overrides:
        if (match := _OVERRIDE.fullmatch(word)) is not None:
            found.add(match[1], scalar(match[2]), "the command line")
    _resolve(found)
    return found


def scalar(text: Any) -> Any:
    """Return a value as YAML 1.2 reads it, lists and mappings on one line too; else the text. A
    value that is no text stays."""
    if not isinstance(text, str):
        return text
    try:
        value = _plain(reader.read(f"value: {text}", source="").value["value"])  # type: ignore[index]
    except (RecipeError, KeyError, TypeError):
        return text
    is_place = isinstance(value, dict) and None in value.values()  # `{NAME}`, which a run fills
    return text if is_place else value


def _plain(node: reader.YamlNode) -> Any:
    if isinstance(node.value, dict):
        return {name: _plain(one) for name, one in node.value.items()}
    if isinstance(node.value, list):
        return [_plain(one) if isinstance(one, reader.YamlNode) else one for one in node.value]
    return node.value


# --- shell


def _add_command(found: Foreign, command: Command, file: str) -> None:
    found.program = command.program or found.program
    for name in command.unknown:
        found.warnings.append(
            f"{file} uses ${{{name}[@]}}, which another file defines: name that file before it"
        )
    words = command.words
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        where = f"{file}:{word.line}"
        name, equals, value = word.text.partition("=")
        if _FLAG.fullmatch(name):
            values = [value] if equals else []
            while not equals and at < len(words) and not _is_flag(words[at].text):
                values.append(words[at].text)
                at += 1
            parsed = [scalar(one) for one in values]
            key = name.removeprefix("--").replace("-", "_") if "." not in name else name[2:]
            found.add(key, _of_flag(parsed), where)
        elif match := _OVERRIDE.fullmatch(word.text):
            found.add(match[1], scalar(match[2]), where)


def _is_flag(text: str) -> bool:
    return _FLAG.fullmatch(text.partition("=")[0]) is not None


def _of_flag(values: list[Any]) -> Any:
    if not values:
        return True
    return values[0] if len(values) == 1 else values


# --- YAML and TOML


def _add_yaml(found: Foreign, text: str, path: Path, *, prefix: str = "") -> None:
    """`prefix`: where the keys belong, as Hydra's `folder@place: name` says."""
    root = reader.read(text, source=path.name)
    if not isinstance(root.value, dict):
        raise RecipeError(
            f"{path} holds no keys", why="its document is not a mapping", fix=f"correct {path}"
        )
    defaults = root.value.get("defaults")
    for entry in _plain(defaults) if defaults is not None else []:
        name = str(next(iter(entry.items()))[-1] if isinstance(entry, dict) else entry)
        other = (path.parent / f"{name.partition('@')[0]}.yaml").resolve()
        group = str(next(iter(entry))) if isinstance(entry, dict) else ""
        folder, _, package = group.partition("@")
        within = (path.parent / folder / f"{name}.yaml").resolve()
        if name == "_self_" or name.endswith("@_here_"):
            continue
        if group and within.is_file() and not prefix:
            text_within = layers.read_text(within, what="configuration")
            _add_yaml(found, text_within, within, prefix=f"{package or folder}.")
        elif other.is_file() and other != path.resolve():
            _add_yaml(found, layers.read_text(other, what="configuration"), other, prefix=prefix)
        else:
            found.warnings.append(f"{path.name} includes `{name}`, which was not read")
    for name, node in root.value.items():
        if name not in ("defaults", "hydra"):
            _flatten(found, f"{prefix}{name}", node, path.name)
    if isinstance(run := found.value(f"{prefix}run"), str):  # of a job; a script
        _add_command(found, read_command(run, {}), path.name)


def _flatten(found: Foreign, name: str, node: reader.YamlNode, file: str) -> None:
    if isinstance(node.value, dict) and node.value:
        for key, inner in node.value.items():
            _flatten(found, f"{name}.{key}", inner, file)
    else:
        found.add(name, _plain(node), f"{file}:{node.line}")


def _add_toml(found: Foreign, text: str, file: str) -> None:
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # nested too deeply, or too many digits
        raise RecipeError(
            f"{file} is not valid TOML", why=str(error), fix=f"correct {file}"
        ) from None
    lines = _lines_of_toml(text)

    def add(name: str, value: Any) -> None:
        if isinstance(value, Mapping) and value:
            for key, inner in value.items():
                add(f"{name}.{key}" if name else key, inner)
        elif isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
            for number, one in enumerate(value):
                add(f"{name}.{number}", one)
        else:
            bare = re.sub(r"\.\d+(?=\.|$)", "", name)
            above = bare.rpartition(".")[0]
            found.add(name, value, f"{file}:{lines.get(bare) or lines.get(above, 1)}")

    add("", table)


def _lines_of_toml(text: str) -> dict[str, int]:
    """Return the line of each key by its dotted name, numbers of tables aside."""
    above, lines = "", dict[str, int]()
    for number, line in enumerate(text.splitlines(), 1):
        if match := re.match(r"\s*\[{1,2}\s*([\w.\"-]+)\s*\]", line):
            above = match[1].replace('"', "")
            lines.setdefault(above, number)
        elif match := re.match(r"\s*([\w.\"-]+)\s*=", line):
            key = match[1].replace('"', "")
            lines.setdefault(f"{above}.{key}" if above else key, number)
    return lines


def _resolve(found: Foreign) -> None:
    """Replace `${a.b}` by the value of that key, `${oc.env:NAME,default}` by the default."""

    def of(match: re.Match[str]) -> str:
        inner = match[1].strip()
        if inner.startswith("oc.env:"):
            _, comma, default = inner.partition(",")
            return default.strip() if comma else match[0]
        known = found.settings.get(inner.removeprefix("oc.select:").partition(",")[0])
        return match[0] if known is None else str(known.value)

    for _ in range(3):  # a value may name another
        for name, one in found.settings.items():
            if isinstance(one.value, str) and "${" in one.value:
                text = _INTERPOLATION.sub(of, one.value)
                if text != one.value:
                    found.settings[name] = replace(one, value=scalar(text))


# --- Python


def _add_python(found: Foreign, text: str, file: str, overrides: Sequence[str]) -> None:
    """The arguments of a launcher; else the keywords of `SomethingConfig(...)`, of
    `SomethingTrainer(...)` as `trainer.NAME`, and of `load_dataset(...)`; names stand for what the
    module assigns to them."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        why = str(error) or "it is nested too deeply"
        raise RecipeError(f"{file} is not valid Python", why=why, fix=f"correct {file}") from None
    if is_launcher(tree):
        words = (_OVERRIDE.fullmatch(word) for word in overrides)
        changes = {match[1]: scalar(match[2]) for match in words if match is not None}
        command, warnings = read_launcher(tree, text, file, changes=changes)
        found.warnings += warnings
        _add_command(found, command, file)
        return
    known: dict[str, ast.expr] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            known[node.targets[0].id] = node.value
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func).rpartition(".")[2]
        is_config = called.endswith(("Config", "TrainingArguments"))
        before = "" if called != "LoraConfig" else "lora_"
        if called.endswith("Trainer"):
            before = "trainer."
        if is_config or before:
            if is_config and not before:
                found.program = called
            for keyword in node.keywords:
                if keyword.arg is not None:
                    value = _literal(keyword.value, known)
                    found.add(f"{before}{keyword.arg}", value, f"{file}:{keyword.value.lineno}")
        elif called == "load_dataset" and node.args:
            parts = [*node.args, *(k.value for k in node.keywords if k.arg in ("name", "split"))]
            name = ":".join(str(_literal(one, known)) for one in parts)
            found.settings.setdefault(
                "dataset_name", Setting("dataset_name", name, f"{file}:{node.lineno}")
            )


def _literal(node: ast.expr, known: Mapping[str, ast.expr], depth: int = 4) -> Any:
    """The value of a constant or of a name that stands for one; else the source text."""
    if isinstance(node, ast.Name) and node.id in known and depth:
        return _literal(known[node.id], known, depth - 1)
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(one, known, depth) for one in node.elts]
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)
