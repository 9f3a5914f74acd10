"""Shows listings (algorithms, models, plug-ins, recipes, recipe keys, environments, tools) as
tables on the screen, one entry in full, or either as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer
import yaml

from milescli.console.output import Mode
from milescli.core.units import format_bytes, format_count

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from milescli.agents.foreign.install import Installed
    from milescli.agents.foreign.packages import Package
    from milescli.console.output import Output
    from milescli.core.registry import PlugPoint
    from milescli.listings.algorithms import AlgorithmRow, Learned
    from milescli.listings.environments import ListedPlugin
    from milescli.listings.models import FamilyRow, ModelNumbers
    from milescli.listings.recipes import RecipeRow
    from milescli.recipe.algorithms import Setting
    from milescli.recipe.keys import RecipeKey
    from milescli.rollout.environment_contract import EnvironmentCheck


def show_algorithms(rows: Sequence[AlgorithmRow], *, output: Output) -> None:
    """Show one line per algorithm."""
    output.json("algorithms", {"algorithms": [asdict(row) for row in rows]})
    output.table(
        ["algorithm", "what it is", "differs from", "by", "paper", "learned"],
        [
            (
                row.name,
                row.about,
                row.base or "",
                _differences(row.sets) if row.base else "sets every component",
                row.paper.removeprefix("arXiv "),
                improvement_text(row.learned),
            )
            for row in rows
        ],
    )
    output.note(
        "\nlearned: greedy held-out accuracy before and after the quickstart's RL steps, mean over "
        "seeds (docs/algorithms.md)"
    )
    output.note(
        "miles launch --recipe NAME --set train.algorithm=NAME   every component can also be "
        "set separately"
    )


def show_algorithm(row: AlgorithmRow, *, output: Output) -> None:
    """Show everything that an algorithm sets."""
    output.json("algorithm", asdict(row))
    output.text(f"{row.name}: {row.about} ({row.paper})")
    output.blank()
    output.table(
        ["key", "value", "by"],
        [
            (key, text(value), row.name if key in row.sets else row.base or "")
            for key, value in row.settings.items()
        ],
    )
    output.note(f"learned the quickstart's task: {improvement_text(row.learned)}")


def text(value: Setting) -> str:
    """Format a value as in a recipe."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else f"{value}"


def improvement_text(learned: Learned | None) -> str:
    """Format a measured improvement: `12 -> 98 %`."""
    if learned is None:
        return "not measured"
    before, after = (100 * sum(values) / len(values) for values in (learned.before, learned.after))
    return f"{before:.0f} -> {after:.0f} %"


def _differences(sets: Mapping[str, Setting]) -> str:
    return ", ".join(f"{key.removeprefix('train.')}={text(value)}" for key, value in sets.items())


def show_families(rows: list[FamilyRow], *, output: Output) -> None:
    """Show one line per family."""
    output.json("models", {"families": [asdict(row) for row in rows]})
    columns = ["family", "stands for", "convert", "train", "logits", "serve on CPU"]
    output.table(columns, [_row(row) for row in rows])
    output.blank()
    output.note(
        "convert: both ways, bit for bit. train: Megatron-Core computes it here; logits: its "
        "largest difference to transformers',\n"
        "relative to the largest logit, in float32. serve: SGLang's log-probs were compared with "
        "transformers'. All of it was measured\n"
        "on a CPU with tiny models of the real architectures; docs/models.md has the figures, the "
        "versions and what is not covered."
    )
    for row in rows:
        if row.remark:
            output.note(f"{row.family}: {row.remark}")
    output.next_steps({"miles models MODEL": "parameters, memory and FLOPs of one model"})


def _row(row: FamilyRow) -> list[object]:
    logits = "not compared" if row.logits is None else f"{row.logits:.0e}"
    return [
        row.family,
        row.stands_for,
        _yes(row.convert),
        _yes(row.train),
        logits,
        _yes(row.serve_cpu),
    ]


def _yes(flag: bool) -> str:
    return "yes" if flag else "no"


def show_numbers(model: ModelNumbers, *, output: Output) -> None:
    """Show the numbers of a model on which the planner relies."""
    output.json("model", asdict(model))
    active = f", {format_count(model.num_active_parameters)} active" if model.num_experts else ""
    more = (
        f" + {format_count(model.num_mtp_parameters)} in MTP layers"
        if model.num_mtp_parameters
        else ""
    )
    experts = (
        {"experts": f"{model.num_experts}, {model.topk} per token"} if model.num_experts else {}
    )
    output.kv(
        {
            "family": model.family,
            "parameters": f"{model.num_parameters:,} "
            f"({format_count(model.num_parameters)}{active}){more}",
            "layers": ", ".join(f"{count} x {kind}" for kind, count in model.layers.items()),
            **experts,
            "vocabulary": f"{model.vocab_size:,}",
            "context": f"{model.max_position_embeddings:,}",
            "weights": f"{format_bytes(model.weights_bf16_bytes)} in bfloat16",
            "cache": f"{format_bytes(model.cache_bytes_per_token)} a token; "
            f"{format_bytes(model.cache_bytes_at_context)} for {model.context:,} tokens",
            "compute": f"{model.forward_flops_per_token / 1e9:,.2f} GFLOP per token forward "
            f"(mean over {model.context:,}), twice as much backward",
            **_towers(model),
        }
    )


def _towers(model: ModelNumbers) -> dict[str, str]:
    if model.num_vision_parameters:
        size = format_count(model.num_vision_parameters)
        return {"vision": f"{size} of the parameters; trained if `model.vision` says so"}
    if model.multimodal:
        return {"next to the text model": "towers that are passed through export untouched"}
    return {}


def show_points(points: Sequence[PlugPoint], *, output: Output) -> None:
    """Show one line per plug point."""
    output.json(
        "plugins",
        {
            "plugins": [
                {
                    "kind": point.kind,
                    "key": point.key,
                    "about": point.about,
                    "signature": point.signature,
                    "names": point.names(),
                    "contract": point.contract,
                }
                for point in points
            ]
        },
    )
    output.table(
        ["kind", "recipe key", "what it does", "signature", "there are"],
        [
            (
                point.kind,
                point.key,
                point.about,
                point.signature,
                ", ".join(point.names()),
            )
            for point in points
        ],
    )
    output.note("\na key takes one of these names, or your own import path: mypkg.module:name")
    output.note("miles plugins new reward my_reward   a working file, and its test")
    output.note("miles plugins check my_reward:my_reward   does it meet its contract?")


def show_written(point: PlugPoint, files: Sequence[Path], *, output: Output) -> None:
    """Show the files of a new plug-in, and what to do with them."""
    name = files[0].stem
    output.json("plugin_written", {"kind": point.kind, "files": [str(file) for file in files]})
    output.text(f"wrote {' and '.join(file.name for file in files)}")
    output.note("export PYTHONPATH=$PWD")
    output.note(f"miles plugins check {name}:{name} {point.kind}")
    output.note(f"miles launch --recipe quickstart --set {point.command_part(f'{name}:{name}')}")


def show_checked_plugin(point: PlugPoint, path: str, *, output: Output) -> None:
    """Show that a plug-in satisfies its contract."""
    output.json("plugin_checked", {"kind": point.kind, "path": path, "bears_its_contract": True})
    output.text(f"`{path}` is a valid {point.kind}: --set {point.command_part(path)}")


UNKNOWN = "-"


def show_recipes(rows: Sequence[RecipeRow], *, output: Output) -> None:
    """Show one line per recipe, smaller models first."""
    output.json("recipes", {"recipes": [asdict(row) for row in rows]})
    output.table(
        ["recipe", "parameters", "fits on", "algorithm", "trains on", "what it is"],
        [
            (
                ", ".join([row.name, *row.aliases]),
                _size(row),
                row.smallest_machine or UNKNOWN,
                row.algorithm,
                row.prompts.removeprefix("hf:"),
                row.description,
            )
            for row in rows
        ],
    )
    output.note(
        "\nfits on: the smallest machine by the planner's estimate, counted in H100s; yours may do "
        "with less or more"
    )
    output.note(
        "miles planned all of these except the quickstarts; they have not been run on a GPU "
        "yet, so watch the first steps closely"
    )
    output.note("miles launch --recipe NAME --dry-run   shows what would run on this machine")


def _size(row: RecipeRow) -> str:
    if row.num_parameters is None:
        return UNKNOWN
    total = format_count(row.num_parameters)
    active = row.num_active_parameters
    return (
        f"{total}, {format_count(active)} active"
        if active and active != row.num_parameters
        else total
    )


NEXT = {
    "environments": {
        "miles env play NAME": "play it yourself",
        "miles env check NAME": "check that it meets its contract",
        "miles plugins new environment my_game": "write your own",
    },
    "tools": {
        "miles launch --recipe quickstart --set rollout.agent=tools "
        "--set 'rollout.tools=[calculator]'": "use a tool",
        "miles plugins new tool my_tool": "write your own",
    },
}


def show_items(
    kind: str,
    rows: Sequence[ListedPlugin],
    *,
    packages: Sequence[tuple[Package, str | None]] = (),
    output: Output,
) -> None:
    """Show one line per item. `packages` are those with their own virtual environments, with the
    reason if one is not usable on this machine."""
    listed: dict[str, Any] = {kind: [asdict(row) for row in rows]}
    if packages:
        listed["packages"] = [_as_json(package, lack) for package, lack in packages]
    output.json(kind, listed)
    columns = ["name", "what it is", "takes", "here"]
    table = [(row.name, row.about, row.takes, "no" if row.lacks else "yes") for row in rows]
    output.table(columns, table)
    output.blank()
    for row in rows:
        if row.lacks:
            output.note(f"{row.name}: {row.lacks}; {row.mend}")
    if packages:
        output.blank()
        columns = ["package", "what it is", "used by", "installed"]
        output.table(
            columns,
            [
                (package.name, package.about, package.use, "no" if lack else "yes")
                for package, lack in packages
            ],
        )
        output.blank()
        for package, lack in packages:
            if lack:
                output.note(f"{package.name}: {lack}; {package.command}")
    output.next_steps(NEXT[kind])


def show_installed(done: Installed, *, output: Output) -> None:
    """Show where an environment's package was installed, and how to use it."""
    package = done.package
    output.json("package", {**_as_json(package, None), "python": done.python})
    if done.was_there:
        output.text(f"{package.name} was already installed")
    output.kv(
        {
            "package": ", ".join(package.requirements),
            "python": done.python,
            "folder": str(package.folder),
            "use": package.use,
        }
    )
    output.next_steps(
        {
            f"{package.interpreter} -m pip install ...": "further packages beside it",
            f"miles launch --recipe RECIPE --set {package.use} ...": "docs/agents.md",
        }
    )


def _as_json(package: Package, lack: str | None) -> dict[str, Any]:
    return {
        "name": package.name,
        "about": package.about,
        "use": package.use,
        "folder": str(package.folder),
        "lacks": lack,
        "mend": package.command if lack else None,
    }


def show_checked_environment(name: str, found: EnvironmentCheck, *, output: Output) -> None:
    """Show the result of a correct environment's check."""
    from milescli.rollout.environment_contract import MAX_STEPS

    output.json("environment", {"name": name, **asdict(found)})
    low, high = found.rewards
    output.kv(
        {
            "episodes": f"{found.num_episodes}, each twice with the same random actions: identical",
            "ended": f"{found.num_ended} of {found.num_episodes} within {MAX_STEPS} steps",
            "rewards": f"{low:g} to {high:g}",
            "steps": f"{found.num_steps:,}, {found.steps_per_s:,.0f} a second in one thread",
            "first": found.first,
        }
    )
    output.text(f"`{name}` meets the contract of an environment")


def settings_of(text: str) -> dict[str, Any]:
    """Parse --settings. Raises BadParameter if it is not a mapping."""
    try:
        settings = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise typer.BadParameter(f"--settings is not valid YAML: {error}") from None
    if not isinstance(settings, dict) or not all(isinstance(key, str) for key in settings):
        raise typer.BadParameter(f"--settings must be a mapping such as '{{id: X}}', not {text}")
    return settings


INTRO = """\
A recipe is YAML and holds only what differs from the defaults below.
On the command line: --set KEY=VALUE. Strongest first:
  --set and flags
  MILES_RUN__NAME=… and MILES_MACHINE__GPUS=…     (sections run and machine only)
  ./miles.yaml and ~/.config/miles/config.yaml    (sections run and machine only)
  the recipe
  the default
"""


def show_keys(output: Output, *, within: str | None = None) -> None:
    """Print recipe keys, section by section: all, or the key or section `within`. Raises
    RecipeError if there is none of that name."""
    from milescli.core.errors import RecipeError
    from milescli.recipe.keys import keys, nearest_key, sections
    from milescli.recipe.layers import example

    shown = [key for key in keys().values() if _is_within(key.name, within)]
    if not shown:
        assert within is not None
        guess = nearest_key(within)
        raise RecipeError(
            f"there is no recipe key `{within}`",
            why=f"the nearest name is `{guess}`" if guess else "no section has that name either",
            fix=f"miles help recipe {guess or ''}".rstrip(),
        )
    payload = [
        {"key": key.name, "wants": key.wants, "default": key.default, "doc": key.doc}
        for key in shown
    ]
    output.json("recipe_keys", {"keys": payload})
    if within == shown[0].name:
        (key,) = shown
        output.kv(
            {
                "key": key.name,
                "takes": key.wants,
                "default": _default(key),
                "meaning": key.doc or "-",
                "set it": f"--set {key.name}={example(key)}",
            }
        )
        return
    if output.mode is Mode.HUMAN and within is None:
        output.text(INTRO)
    for name in ["", *sections()]:
        inside = [key for key in shown if key.name.rpartition(".")[0] == name]
        rows = [(key.name, _default(key), _meaning(key)) for key in inside]
        if rows:
            title = f"{name}: {sections()[name].doc}" if name else "recipe"
            output.table(["key", "default", "meaning"], rows, title=title)
            output.blank()


def _is_within(name: str, within: str | None) -> bool:
    return within is None or name == within or name.startswith(f"{within}.")


def _default(key: RecipeKey) -> str:
    if key.default is None:
        return "null"
    return str(key.default).lower() if isinstance(key.default, bool) else f"{key.default}"


def _meaning(key: RecipeKey) -> str:
    return f"{key.wants}. {key.doc}".replace("\n", " ") if key.doc else key.wants
