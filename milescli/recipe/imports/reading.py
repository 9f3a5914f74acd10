"""Reads a configuration of another framework into settings with their lines: a shell script, YAML
with Hydra's interpolation, TOML, or the call of a config class in Python. Runs, imports and fetches
nothing. Knows no framework's keys."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from milescli.core.errors import RecipeError
from milescli.core.files import parse_json
from milescli.core.private import REMOVED, holds_secret
from milescli.recipe import layers, reader
from milescli.recipe.imports.launcher import (
    Unknown,
    evaluate_expression,
    is_launcher,
    read_launcher,
)
from milescli.recipe.imports.shell import Command, Word, read_command

SHELL, YAML, TOML, PYTHON = (".sh", ".bash"), (".yaml", ".yml"), (".toml",), (".py",)
NOTEBOOK = ".ipynb"
_PARENT_LEVELS = 4
"""Number of folders around a script that are searched for a file that it names."""
_OTHERS = ("BitsAndBytesConfig", "GenerationConfig", "AutoConfig", "PeftConfig", "basicConfig")
_ADAPTERS = ("LoraConfig", "get_peft_model")
_PART_CONFIGS = {*_ADAPTERS, "ModelConfig"}
"""Configuration classes of a part of the training (an adapter, a model), not of the training
itself."""
_REWARD_TRAINERS = ("GRPOTrainer", "RLOOTrainer", "AsyncGRPOTrainer")
"""Trainers whose second argument is the reward."""
_SECRET = re.compile(
    r"api_?key|wandb[._]key|authorization|password|secret|(auth|access|hub|hf)_?token$",
    re.IGNORECASE,
)
"""Names of keys whose values appear neither in a recipe nor in output."""
_HEREDOC_FILE = re.compile(
    r"\bcat\s*>\s*[\"']?([^\s\"']+)[\"']?\s*<<-?\s*[\"']?(\w+)[\"']?[^\n]*\n(.*?)^\s*\2\s*$",
    re.DOTALL | re.MULTILINE,
)
"""Pattern of a here-document with which a script writes a file."""
_SOURCE_COMMAND = re.compile(r"^\s*(?:source|\.)\s+[\"']?([^\s\"';&|]+)", re.MULTILINE)
_INTERPOLATION = re.compile(r"\$\{([^{}]+)\}")
_FLAG = re.compile(r"--[A-Za-z][\w.-]*")
_ENDS_FLAG = re.compile(r"--[A-Za-z][\w.-]*(=|$)|\+{0,2}[A-Za-z_]\w*\.[\w.]+=")
"""Pattern of a word that cannot be the value of the flag before it: another flag, or an
override."""
_OVERRIDE = re.compile(r"(?:\+{1,2}|~)?([A-Za-z_][\w./@-]*)=(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Setting:
    """Describes one key of another framework."""

    name: str
    value: Any
    where: str
    """`run.sh:12`, or the class or program whose default this is."""


@dataclass(slots=True)
class ForeignConfig:
    """Holds the contents of files of another framework."""

    form: str = ""
    """shell, yaml, toml or python"""
    program: str = ""
    """The program that a script runs, as `verl.trainer.main_ppo`; the class that a Python file
    calls."""
    settings: dict[str, Setting] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    """What could not be read."""
    text: str = ""
    objective: str = ""
    """The objective of a run on rows, from `trains_rows`; empty for RL."""
    files: list[tuple[str, str]] = field(default_factory=list)
    """Configuration files that a command names, each with the prefix of its keys."""
    places: list[str] = field(default_factory=list)
    """Names of the files and of their folders, the nearest first."""

    def add(self, name: str, value: Any, where: str) -> None:
        """Set a key; a later value replaces an earlier one."""
        self.settings[name] = Setting(name, value, where)

    def value(self, name: str, default: Any = None) -> Any:
        """Return the value of a key, or the default if it is not set or null."""
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


def read_files(paths: Sequence[Path], *, overrides: Sequence[str] = ()) -> ForeignConfig:
    """Read files, of which later ones override earlier ones, then `overrides` (`a.b=c`). Raises
    RecipeError for a file in no supported form, or one that is invalid in its form."""
    found, variables = ForeignConfig(), dict[str, list[Word]]()
    for path in paths:
        if not path.exists():
            raise RecipeError(
                f"there is no file {path}",
                why="miles import reads files of another framework",
                fix=f"ls {path.parent}",
            )
        text = layers.read_text(path, what="configuration")
        found.text += text
        found.places += [path.stem, *(one.name for one in path.absolute().parents)]
        suffix = path.suffix.lower()
        if suffix in YAML:
            found.form = found.form or "yaml"
            _add_yaml(found, text, path)
        elif suffix in TOML:
            found.form = found.form or "toml"
            _add_toml(found, text, path)
        elif suffix in PYTHON:
            found.form = found.form or "python"
            _add_python(found, text, path.name, overrides)
        elif suffix == NOTEBOOK:
            found.form = found.form or "python"
            _add_python(found, _code_of(text, path), path.name, overrides)
        elif suffix in SHELL or text.startswith("#!"):
            found.form = found.form or "shell"
            _add_sourced(path, text, variables)
            _add_command(found, read_command(text, variables), path.name)
            _set_file(variables, path.name)
            _add_named(found, path, text)
        else:
            raise RecipeError(
                f"miles cannot read {path} as a configuration",
                why="it reads shell scripts (.sh), YAML, TOML, and calls of a config class in "
                "Python (.py, .ipynb)",
                fix=f"mv {path} {path.with_suffix('.sh').name}   # if it is a shell script",
            )
    for word in overrides:
        if (match := _OVERRIDE.fullmatch(word)) is not None:
            found.add(match[1], scalar(match[2]), "the command line")
    _resolve(found)
    for name, one in found.settings.items():
        if not isinstance(one.value, str) or "$" in one.value:
            continue
        if _SECRET.search(name) or holds_secret(one.value):
            found.settings[name] = replace(one, value=REMOVED)
    return found


def scalar(text: Any) -> Any:
    """Parse a value as YAML 1.2 does, including lists and mappings on one line; return the text if
    that fails. A value that is not a text is returned unchanged."""
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


def _add_sourced(script: Path, text: str, variables: dict[str, list[Word]]) -> None:
    """Add the variables of files that a script sources, if they lie in its folder or around it."""
    for match in _SOURCE_COMMAND.finditer(text):
        parts = Path(match[1]).parts
        tails = [Path(*parts[at:]) for at in range(len(parts)) if parts[at] not in ("/", "..")]
        places = (
            one / tail for tail in tails for one in script.absolute().parents[:_PARENT_LEVELS]
        )
        file = next((one for one in places if _is_file(one) and one.suffix in SHELL), None)
        if file is not None and file != script.absolute():
            read_command(layers.read_text(file, what="configuration"), variables)
            _set_file(variables, file.name)


def _is_file(path: Path) -> bool:
    """Return True if the path is a file; False also for a text that cannot be a path."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _set_file(variables: dict[str, list[Word]], file: str) -> None:
    """Record in the words of a file from which file they come."""
    for name, words in variables.items():
        variables[name] = [one if one.file else replace(one, file=file) for one in words]


def _add_command(found: ForeignConfig, command: Command, file: str) -> None:
    found.program = command.program or found.program
    for name in command.unknown:
        found.warnings.append(
            f"{file} uses ${{{name}[@]}}, which another file defines: name that file before it"
        )
    for name in command.loops:
        found.warnings.append(f"{file} trains for each {name} of a loop: this is the first")
    words = command.words
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        where = f"{word.file or file}:{word.line}"
        if word.text == "@" and at < len(words):
            found.files.append(("", words[at].text))
        name, equals, value = word.text.partition("=")
        if _FLAG.fullmatch(name):
            values = [value] if equals else []
            while not equals and at < len(words) and not _ENDS_FLAG.match(words[at].text):
                values.append(words[at].text)
                at += 1
            parsed = [scalar(one) for one in values]
            key = name.removeprefix("--").replace("-", "_")
            if values[:1] == ["@"] and len(values) == 2:
                found.files.append((f"{key}.", values[1]))
            else:
                found.add(key, _flag_value(parsed), where)
        elif match := _OVERRIDE.fullmatch(word.text):
            found.add(match[1], scalar(match[2]), where)


def _flag_value(values: list[Any]) -> Any:
    if not values:
        return True
    return values[0] if len(values) == 1 else values


# --- YAML and TOML


def _add_named(found: ForeignConfig, script: Path, text: str) -> None:
    """Add the files that a script names as its configuration, below its own keys: with `@`,
    `--config`, or Hydra's --config-path and --config-name. The script writes them itself, or they
    are in its folder or in one of its parents."""
    name = str(found.value("config_name", "")).removesuffix(".yaml")
    config_path = str(found.value("config_path", "config")).rstrip("/")
    folders = (config_path.rpartition("/")[2], re.sub(r"^\$\{?\w+\}?/", "", config_path))
    named = [[("", f"{folder}/{name}.yaml") for folder in folders if name]]
    named += [[one] for one in found.files]
    config = str(found.value("config", ""))
    named += [[("", config)]] if config.endswith((*YAML, *TOML)) else []
    written = {match[1]: match[3] for match in _HEREDOC_FILE.finditer(text)}
    below = ForeignConfig()
    for choices in named:
        places = [
            (one, file) for one in script.absolute().parents[:_PARENT_LEVELS] for file in choices
        ]
        there = ((prefix, one / file) for one, (prefix, file) in places if _is_file(one / file))
        prefix, path = next(there, choices[0] if choices else ("", ""))
        inner = written.get(str(path)) if choices else None
        if inner is None and isinstance(path, Path):
            inner = layers.read_text(path, what="configuration")
        if inner is not None:
            add = _add_toml if Path(path).suffix in TOML else _add_yaml
            add(below, inner, Path(path), prefix=prefix)
            if choices[0][1] == config:
                del found.settings["config"]
        elif choices and not name:
            below.warnings.append(f"{script.name} names {path}, which is not there")
    found.settings = below.settings | found.settings
    found.warnings += below.warnings


def _add_yaml(found: ForeignConfig, text: str, path: Path, *, prefix: str = "") -> None:
    """Add the keys of a YAML file below `prefix`, and of the files that its defaults name
    (`folder@place: name`)."""
    root = reader.read(text, source=path.name)
    if not isinstance(root.value, dict):
        raise RecipeError(
            f"{path} holds no keys", why="its document is not a mapping", fix=f"correct {path}"
        )
    script = _plain(root.value["run"]) if "run" in root.value else None
    if isinstance(script, str) and (command := read_command(script, {})).words:
        line = root.value["run"].line  # of a job, which is nothing but this script
        moved = [replace(one, line=one.line + line) for one in command.words]
        _add_command(found, replace(command, words=moved), path.name)
        return
    defaults = _plain(root.value["defaults"]) if "defaults" in root.value else None
    for entry in defaults if isinstance(defaults, list) else []:
        name = str(next(iter(entry.items()))[-1] if isinstance(entry, dict) else entry)
        other = (path.parent / f"{name.partition('@')[0]}.yaml").resolve()
        group = str(next(iter(entry))) if isinstance(entry, dict) else ""
        folder, _, package = group.partition("@")
        within = (path.parent / folder / f"{name}.yaml").resolve()
        if name == "_self_" or name.endswith("@_here_"):
            continue
        if group and _is_file(within) and not prefix:
            text_within = layers.read_text(within, what="configuration")
            _add_yaml(found, text_within, within, prefix=f"{package or folder}.")
        elif _is_file(other) and other != path.resolve():
            _add_yaml(found, layers.read_text(other, what="configuration"), other, prefix=prefix)
        else:
            found.warnings.append(f"{path.name} includes `{name}`, which was not read")
    for name, node in root.value.items():
        if name not in ("defaults", "hydra"):
            _flatten(found, f"{prefix}{name}", node, path.name)


def _flatten(found: ForeignConfig, name: str, node: reader.YamlNode, file: str) -> None:
    if isinstance(node.value, dict) and node.value:
        for key, inner in node.value.items():
            _flatten(found, f"{name}.{key}", inner, file)
    else:
        found.add(name, _plain(node), f"{file}:{node.line}")


def _add_toml(found: ForeignConfig, text: str, path: Path, *, prefix: str = "") -> None:
    file = path.name
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
            where = f"{file}:{lines.get(bare) or lines.get(above, 1)}"
            found.add(f"{prefix}{name}", value, where)

    add("", table)


def _lines_of_toml(text: str) -> dict[str, int]:
    """Return the line of each key by its dotted name, without the numbers of array tables."""
    above, lines = "", dict[str, int]()
    for number, line in enumerate(text.splitlines(), 1):
        if match := re.match(r"\s*\[{1,2}\s*([\w.\"-]+)\s*\]", line):
            above = match[1].replace('"', "")
            lines.setdefault(above, number)
        elif match := re.match(r"\s*([\w.\"-]+)\s*=", line):
            key = match[1].replace('"', "")
            lines.setdefault(f"{above}.{key}" if above else key, number)
    return lines


def _resolve(found: ForeignConfig) -> None:
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


def _code_of(text: str, path: Path) -> str:
    """Return the code of a notebook without the lines that are for its shell."""
    try:
        cells = parse_json(text)["cells"]
        code = [_lines_of(one["source"]) for one in cells if one["cell_type"] == "code"]
    except (ValueError, LookupError, TypeError, RecursionError):
        raise RecipeError(
            f"{path} is not a valid notebook", why="it has no cells", fix=f"correct {path}"
        ) from None
    return "\n".join(code)


def _lines_of(cell: Sequence[str]) -> str:
    """Return a cell without its shell commands; return an empty text for one that is not Python."""
    lines = "".join(cell).splitlines()
    code = "\n".join("" if one.lstrip().startswith(("!", "%")) else one for one in lines)
    try:
        ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    return code


def _add_python(found: ForeignConfig, text: str, file: str, overrides: Sequence[str]) -> None:
    """Add the arguments of a launcher to `found`. If the module is not one, add the keywords of
    `SomethingConfig(...)`, of `SomethingTrainer(...)` as `trainer.NAME`, and of
    `load_dataset(...)`; names are replaced by what the module assigns to them."""
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
    known, calls = _names_of(tree), list[tuple[str, ast.Call]]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            calls.append((ast.unparse(node.func).rpartition(".")[2], node))
    configs = _configs_of({called for called, _ in calls})
    if not any(node.keywords for called, node in calls if called in configs - _PART_CONFIGS):
        _add_usage(found, tree, file)
    for called, node in calls:
        where = f"{file}:{node.lineno}"
        if called.endswith("Trainer") or called in configs:
            before = "lora_" if called in _ADAPTERS else ""
            if called.endswith("Trainer"):
                before, found.program = "trainer.", called
            elif not before and not found.program.endswith("Trainer"):
                found.program = called
            for name, value, line in _arguments(node, called, known):
                if isinstance(value, Unknown) and f"{before}{name}" in found.settings:
                    continue  # the usage has said it
                plain_value = str(value) if isinstance(value, Unknown) else value
                found.add(f"{before}{name}", plain_value, f"{file}:{line}")
        elif called == "load_dataset" and node.args:
            parts = [*node.args, *(k.value for k in node.keywords if k.arg in ("name", "split"))]
            values = [_literal(one, known) for one in parts]
            if all(isinstance(one, str) for one in values):
                named = Setting("dataset_name", ":".join(map(str, values)), where)
                found.settings.setdefault("dataset_name", named)


def _add_usage(found: ForeignConfig, tree: ast.Module, file: str) -> None:
    """Add the first command that the module's docstring shows."""
    if ast.get_docstring(tree) is None:
        return
    first = tree.body[0]
    assert isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    text = str(first.value.value)
    for part in re.finditer(r"(?:(?!\n\s*\n|```).)+", text, re.DOTALL):
        command = read_command(part[0], {}) if " --" in part[0] else Command()
        if command.words:
            above = first.lineno + text.count("\n", 0, part.start()) - 1
            moved = [replace(one, line=one.line + above) for one in command.words]
            _add_command(found, replace(command, words=moved), file)
            return


def _arguments(
    node: ast.Call, called: str, known: Mapping[str, ast.expr]
) -> Iterator[tuple[str, Any, int]]:
    """Yield the names, values and lines of a call's arguments, including those of `**NAME` and the
    trainer's positional ones."""
    positions = ("model", *(("reward_funcs",) if called in _REWARD_TRAINERS else ()))
    for name, one in zip(positions, node.args, strict=False):
        if called.endswith("Trainer"):
            yield name, _literal(one, known), one.lineno
    for keyword in node.keywords:
        of = keyword.value
        if keyword.arg is not None:
            yield keyword.arg, _literal(of, known), of.lineno
            continue
        of = known.get(ast.unparse(of), of)
        pairs = list(zip(of.keys, of.values, strict=True)) if isinstance(of, ast.Dict) else []
        pairs += [
            (ast.Constant(one.arg), one.value) for one in getattr(of, "keywords", []) if one.arg
        ]
        for key, inner in pairs:
            if key is not None:
                yield str(_literal(key, known)), _literal(inner, known), inner.lineno


def _configs_of(called: set[str]) -> set[str]:
    """Return the called classes that configure the training: those named after the trainer, or else
    those that do not configure a part."""
    configs = {one for one in called if one.endswith("Config")} - set(_OTHERS)
    of_trainer = {one.removesuffix("Trainer") + "Config" for one in called}
    return (configs & of_trainer or configs) | _PART_CONFIGS | {"TrainingArguments"}


def _names_of(tree: ast.Module) -> dict[str, ast.expr]:
    """Return what the module assigns to names: its own assignments, defaults of its functions'
    parameters, and, as `args.NAME`, those of the options that it parses and of the fields of its
    classes."""
    known, defaults = dict[str, ast.expr](), dict[str, ast.expr]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            pairs = [(target, value)]
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = list(zip(target.elts, value.elts, strict=False))
            elif isinstance(target, ast.Tuple):  # `model, tokenizer = from_pretrained(...)`
                pairs = [(target.elts[0], value)]
            names_of = [
                (one.id, expression) for one, expression in pairs if isinstance(one, ast.Name)
            ]
            known |= {
                name: expression
                for name, expression in names_of
                if not _wraps_name(expression, name)
            }
        elif isinstance(node, ast.FunctionDef):
            given = [*node.args.posonlyargs, *node.args.args][-len(node.args.defaults) or None :]
            pairs_of = zip(given, node.args.defaults, strict=False)
            defaults |= {one.arg: value for one, value in pairs_of}
        elif isinstance(node, ast.AnnAssign) and node.value and isinstance(node.target, ast.Name):
            defaults |= {f"{before}{node.target.id}": node.value for before in ("", "args.")}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".add_argument"):
            names = [one.value for one in node.args if isinstance(one, ast.Constant)]
            default = next((one.value for one in node.keywords if one.arg == "default"), None)
            if names and default is not None:
                known[f"args.{str(names[-1]).lstrip('-').replace('-', '_')}"] = default
    return defaults | known


def _wraps_name(value: ast.expr, name: str) -> bool:
    """Return True for a call `f(NAME, ...)`, which is read as the value of NAME."""
    given = value.args[:1] if isinstance(value, ast.Call) else []
    return [ast.unparse(one) for one in given] == [name]


def _literal(node: ast.expr, known: Mapping[str, ast.expr], depth: int = 4) -> Any:
    """Return the value of a constant, of a name that is assigned one, or the path that a model is
    loaded from; otherwise Unknown, with the source. For a list, return that of each item, with
    unknown ones as text."""
    source = ast.unparse(node)
    name = re.sub(r"^\w*args\.", "args.", source)
    if name in known and depth:
        return _literal(known[name], known, depth - 1)
    if isinstance(node, ast.List | ast.Tuple):
        return [
            one.source if isinstance(one, Unknown) else one
            for one in (_literal(inner, known, depth) for inner in node.elts)
        ]
    if isinstance(node, ast.Call) and source.split("(")[0].endswith("from_pretrained"):
        named = [
            one.value for one in node.keywords if str(one.arg).endswith(("name", "name_or_path"))
        ]
        first = [*node.args, *named][:1]
        return _literal(first[0], known, depth - 1) if first and depth else Unknown(source)
    inner = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)} & set(known)
    return evaluate_expression(
        node, {one: _literal(known[one], known, depth - 1) for one in inner if depth}
    )
