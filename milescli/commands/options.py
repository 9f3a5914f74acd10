"""Defines options and arguments that several verbs share, and the decorator that makes a function a
verb."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, cast

import typer
from typer.core import TyperCommand

from milescli.commands import suggest
from milescli.console.pager import paging
from milescli.core.errors import MilesError

if TYPE_CHECKING:
    from milescli.console.output import Output
    from milescli.platform.machine import Machine
    from milescli.recipe.load import LoadedRecipe

JsonOption = Annotated[
    bool,
    typer.Option(
        "--json", help="Print one JSON object per line, for programs.", rich_help_panel="Output"
    ),
]
QuietOption = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print bare results only.", rich_help_panel="Output")
]

RecipeOption = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        "-r",
        metavar="NAME|FILE",
        help="Name of a built-in recipe, or a .yaml file.",
        autocompletion=suggest.recipes,
    ),
]
RecipeArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="RECIPE",
        help="Name of a built-in recipe, or a .yaml file.",
        autocompletion=suggest.recipes,
        show_default=False,
    ),
]
OptionalRecipeOption = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        "-r",
        metavar="NAME|FILE",
        help="Also check what this recipe needs.",
        autocompletion=suggest.recipes,
    ),
]


def _warn_of_repeated(context: typer.Context, sets: list[str] | None) -> list[str] | None:
    """Warn about a key that `--set` names twice with different values: the last one counts."""
    last: dict[str, str] = {}
    for text in sets or ():
        name = text.partition("=")[0].strip()
        if last.setdefault(name, text) != text and context.obj is not None:
            context.obj.warn(f"`--set {text}` overrides `--set {last[name]}`: the last one wins")
        last[name] = text
    return sets


SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "-s",
        metavar="KEY=VALUE",
        help="Set a recipe key; repeatable.",
        autocompletion=suggest.overrides,
        callback=_warn_of_repeated,
    ),
]
RunArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="A run: its name or its directory.",
        autocompletion=suggest.runs,
        show_default=False,
    ),
]
ToOption = Annotated[
    str,
    typer.Option(
        "--to",
        metavar="DIR|URL",
        help="The folder to create, here or in an object store (s3://bucket/name).",
        show_default=False,
    ),
]
ResumedArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="A run: its name, its directory, or the URL to which checkpoint.mirror copied it.",
        autocompletion=suggest.runs,
        show_default=False,
    ),
]
NameOption = Annotated[str | None, typer.Option("--name", "-n", help="Name of the run (run.name).")]
NodesOption = Annotated[
    int | None, typer.Option("--nodes", min=1, help="Number of nodes (machine.nodes).")
]
SeedOption = Annotated[
    int | None, typer.Option("--seed", min=0, help="Random seed of the run (run.seed).")
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Show the plan and the reasons for it; start nothing.")
]
VerboseOption = Annotated[
    bool,
    typer.Option("--verbose", "-v", help="With --dry-run: also show where every value comes from."),
]
StepsOption = Annotated[
    int | None, typer.Option("--steps", min=1, help="Last step to train (train.steps).")
]
HostOption = Annotated[
    str,
    typer.Option(
        "--host", metavar="ADDRESS", help="Address to listen on; other computers can reach it."
    ),
]
AddressOption = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="HOST:PORT",
        help="Running Ray cluster to use (machine.address); RAY_ADDRESS by default.",
    ),
]
CheckpointStepOption = Annotated[
    int | None, typer.Option("--step", min=0, help="Step of the checkpoint; the newest by default.")
]
LoraOption = Annotated[
    int | None,
    typer.Option(
        "--lora", min=1, metavar="RANK", help="Train a LoRA adapter of this rank (train.lora.rank)."
    ),
]
AdapterOption = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="NAME=FILE",
        help="Train several adapters at once: FILE holds what adapter NAME changes in the "
        "recipe. Repeatable.",
    ),
]
OnOption = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="MACHINE|FILE",
        help="With --dry-run or --emit: plan for this machine, such as 16x8xMI355X.",
    ),
]
PriceOption = Annotated[
    float | None,
    typer.Option(
        "--price-per-gpu-hour", min=0.0, help="With --dry-run: show what the run would cost."
    ),
]


class JobForm(StrEnum):
    """Names what --emit writes; `jobs.script` has a form for each."""

    SLURM = "slurm"
    KUBERAY = "kuberay"
    SSH = "ssh"


EmitOption = Annotated[
    JobForm | None, typer.Option("--emit", help="Print a job script for the plan; start nothing.")
]


def _gpus(text: str) -> str:
    if text != "all" and not text.isdecimal():
        raise typer.BadParameter(f"`{text}` is neither a number nor `all`")
    return "null" if text == "all" else text


GpusOption = Annotated[
    str | None,
    typer.Option(
        "--gpus",
        metavar="[N|all]",
        parser=_gpus,
        help="GPUs per node (machine.gpus); `all` or no value: all visible GPUs; 0: the CPU.",
    ),
]


def fill_bare_options(argv: list[str]) -> list[str]:
    """Replace `--gpus` without a number by `--gpus all`, since Typer has no options with optional
    values."""
    filled = []
    for place, word in enumerate(argv):
        filled.append(word)
        if word == "--":
            return [*filled, *argv[place + 1 :]]
        if word == "--gpus" and (place + 1 == len(argv) or argv[place + 1].startswith("-")):
            filled.append("all")
    return filled


def planned_machine(
    on: str | None, *, price: float | None, dry_run: bool, emits: bool = False
) -> Machine | None:
    """Return the machine that `--on` names or describes. Raises BadParameter if nothing is planned,
    MachineError or RecipeError if the description is unreadable."""
    if dry_run and emits:
        raise typer.BadParameter("--emit and --dry-run both show a plan: use only one of them")
    if on is not None and not (dry_run or emits):
        raise typer.BadParameter(
            "--on only plans for another machine, while a run uses this one: add --dry-run or "
            "--emit"
        )
    if price is not None and not dry_run:
        raise typer.BadParameter("--price-per-gpu-hour only applies to a plan: add --dry-run")
    if on is None:
        return None
    from milescli.platform.machine import read_machine

    return read_machine(on)


@dataclass(frozen=True, slots=True)
class Group:
    """Describes a group of verbs, `miles NAME`."""

    name: str
    about: str
    page: str
    """Page that is shown if none of its verbs is named."""


_VERBS = defaultdict[str, list[tuple[Group | None, Callable[[typer.Typer], None]]]](list)
"""Name of a module -> for each of its verbs, in order: the group, and a function that adds the verb
there."""


def verb(
    name: str,
    *,
    examples: list[str],
    is_page: bool = False,
    cls: type[TyperCommand] | None = None,
    group: Group | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function `miles NAME`, with --json and --quiet, and examples below its help.
    `is_page`: it prints a page to read, through a pager if it is long. `cls` parses its
    arguments."""
    epilog = "\n".join(["Examples:", *examples])

    def declare(function: Callable[..., None]) -> Callable[..., None]:
        def add(app: typer.Typer) -> None:
            signature = inspect.signature(function, eval_str=True)

            @wraps(function)
            def run(*args: object, json_mode: bool, quiet: bool, **kwargs: object) -> None:
                context = cast(typer.Context, kwargs["context"])
                with paging(context.obj) if is_page else nullcontext():
                    function(*args, **kwargs)  # the single door has read both: see app.main

            extra = [
                inspect.Parameter(
                    name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=False
                )
                for name, kind in (("json_mode", JsonOption), ("quiet", QuietOption))
            ]
            parameters = [*signature.parameters.values(), *extra]
            run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
            about = " ".join((function.__doc__ or "").split())  # else its lines are kept as lines
            run.__doc__, first = about, about.partition(". ")[0].rstrip(".") + "."
            run.__annotations__ = {each.name: each.annotation for each in parameters}
            app.command(name, cls=cls, epilog=epilog, short_help=first)(run)

        _VERBS[function.__module__].append((group, add))
        return function

    return declare


def add_verbs(app: typer.Typer, module: ModuleType) -> None:
    """Add the verbs of a module in their order."""
    groups = dict[Group, typer.Typer]()
    for group, add in _VERBS[module.__name__]:
        if group is not None and group not in groups:
            groups[group] = _group_app(app, group)
        add(app if group is None else groups[group])


def _group_app(app: typer.Typer, group: Group) -> typer.Typer:
    made = typer.Typer(help=group.about)

    @made.callback(invoke_without_command=True)
    def show_page(context: typer.Context) -> None:
        if context.invoked_subcommand is None:
            context.obj.text(group.page)

    app.add_typer(made, name=group.name)
    return made


def flags_of(**options: tuple[str, object]) -> dict[str, str]:
    """Return the flags that were given, by recipe key: `flags_of(train__steps=("--steps", 4))` ->
    {"train.steps": "--steps 4"}; an option that is None was not given."""
    return {
        key.replace("__", "."): f"{option} {value}"
        for key, (option, value) in options.items()
        if value is not None
    }


@contextmanager
def fixes_in_words_of(verb_words: str, *, instead_of: str) -> Iterator[None]:
    """Let errors name what this verb takes: their fixes begin with `verb_words` where they began
    with `instead_of`, an option that this verb does not have."""
    try:
        yield
    except MilesError as error:
        error.fixes = [
            verb_words + fix.removeprefix(instead_of) if fix.startswith(instead_of) else fix
            for fix in error.fixes
        ]
        raise


def recipe_environment() -> dict[str, object]:
    """Return the environment variables and folders that loading a recipe needs."""
    import os

    return {"environ": dict(os.environ), "cwd": Path.cwd(), "home": Path.home()}


def read_recipe(
    positional: str | None,
    option: str | None,
    *,
    sets: list[str] | None,
    flags: dict[str, str],
    adapters: list[str] | None,
    output: Output,
) -> LoadedRecipe:
    """Load the recipe of the command line, which names it as an argument or by --recipe, and show
    its warnings."""
    from milescli.recipe.load import load
    from milescli.recipe.several import from_options

    further = from_options(adapters or [])
    loaded = load(
        _named(positional, option),
        sets=sets or [],
        flags=flags,
        further=further,
        **recipe_environment(),
    )
    for warning in loaded.warnings:
        output.warn(warning)
    return loaded


def _named(positional: str | None, option: str | None) -> str:
    if positional is not None and option is not None and positional != option:
        raise typer.BadParameter(
            f"`{positional}` and `--recipe {option}` name two different recipes"
        )
    recipe = positional or option
    if not recipe:
        raise typer.BadParameter(
            "name a recipe, e.g. `miles launch quickstart`; `miles recipes` lists all"
        )
    return recipe


_SUBJECT = typer.Argument(
    metavar="RUN|CHECKPOINT|MODEL|URL",
    help="A run, one of its checkpoints (RUN@STEP or its folder), a model (folder or hub "
    "name), or the URL of an endpoint.",
    autocompletion=suggest.runs,
    show_default=False,
)
SubjectArgument = Annotated[str, _SUBJECT]
OptionalSubjectArgument = Annotated[str | None, _SUBJECT]
DataOption = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        "-d",
        metavar="[NAME=]FILE",
        help="Prompts to use instead of the recipe's; repeatable.",
    ),
]
StepsListOption = Annotated[
    str | None,
    typer.Option(
        "--steps",
        metavar="N,N|all",
        help="Evaluate several checkpoints, starting the engines only once.",
    ),
]
NumPromptsOption = Annotated[
    int | None,
    typer.Option("--num-prompts", min=1, help="Use only the first N prompts of each set."),
]
SamplesOption = Annotated[
    int | None, typer.Option("--samples", min=1, help="Number of samples per prompt.")
]
TemperatureOption = Annotated[
    float | None, typer.Option("--temperature", min=0.0, help="Sampling temperature; 0 is greedy.")
]
KOption = Annotated[
    list[int] | None, typer.Option("-k", min=1, help="The k of pass@k and maj@k; repeatable.")
]
DomainOption = Annotated[
    str | None,
    typer.Option(
        "--domain", metavar="COLUMN", help="Report accuracy for each value of this column."
    ),
]
AgainstOption = Annotated[
    str | None,
    typer.Option(
        "--against",
        metavar="RUN|MODEL|URL|FILE",
        help="Compare with another model, or with earlier results.",
    ),
]
OutOption = Annotated[
    Path | None,
    typer.Option(
        "--out", help="Where to write the results of a MODEL; the runs folder by default."
    ),
]


class Format(StrEnum):
    """Names the number formats of exported weights."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    FP8 = "fp8"
    MXFP8 = "mxfp8"
    INT4 = "int4"
    NVFP4 = "nvfp4"
    MXFP4 = "mxfp4"


class ExportDtype(StrEnum):
    """Names the values of --dtype, the predecessor of --format."""

    BF16 = "bf16"
    FP32 = "fp32"


class ExportRole(StrEnum):
    """Names which of a run's models is exported."""

    POLICY = "policy"
    CRITIC = "critic"


RoleOption = Annotated[
    ExportRole, typer.Option("--role", help="Which of the run's models to export.")
]
FormatOption = Annotated[
    Format | None,
    typer.Option(
        "--format", "-f", help="Number format of the weights; as in config.json by default."
    ),
]
BaseOption = Annotated[
    Path | None,
    typer.Option(
        "--base", help="Base model of an adapter, or of a checkpoint without config.json."
    ),
]
MergeOption = Annotated[
    bool, typer.Option("--merge", help="Merge the adapter into its base model.")
]
PushOption = Annotated[
    str | None,
    typer.Option("--push", metavar="ORG/NAME", help="Upload the export to the Hugging Face hub."),
]
PrivateOption = Annotated[
    bool, typer.Option("--private/--public", help="Visibility of a repository that --push creates.")
]
