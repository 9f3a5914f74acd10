"""Options and arguments that several verbs share, and the decorator that makes a function a
verb."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from milescli.commands import suggest
from milescli.console.pager import paged

if TYPE_CHECKING:
    from milescli.console.output import Output
    from milescli.platform.machine import Machine
    from milescli.recipe.load import LoadedRecipe

JsonOption = Annotated[
    bool,
    typer.Option("--json", help="One JSON object a line, for programs.", rich_help_panel="Output"),
]
QuietOption = Annotated[
    bool, typer.Option("--quiet", "-q", help="Bare results only.", rich_help_panel="Output")
]

RecipeOption = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        "-r",
        metavar="NAME|FILE",
        help="A recipe that ships, or a .yaml file.",
        autocompletion=suggest.recipes,
    ),
]
RecipeArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="RECIPE",
        help="A recipe that ships, or a .yaml file.",
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
        help="Check for this recipe too.",
        autocompletion=suggest.recipes,
    ),
]


def _say_repeated(context: typer.Context, sets: list[str] | None) -> list[str] | None:
    """Warn of a key that `--set` names twice with different values: the last one counts."""
    last: dict[str, str] = {}
    for text in sets or ():
        name = text.partition("=")[0].strip()
        if last.setdefault(name, text) != text and context.obj is not None:
            context.obj.warn(f"`--set {text}` replaces `--set {last[name]}`: the last one counts")
        last[name] = text
    return sets


SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "-s",
        metavar="KEY=VALUE",
        help="Set a recipe key; may be repeated.",
        autocompletion=suggest.overrides,
        callback=_say_repeated,
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
NameOption = Annotated[str | None, typer.Option("--name", "-n", help="Name of the run (run.name).")]
NodesOption = Annotated[int | None, typer.Option("--nodes", min=1, help="Nodes (machine.nodes).")]
SeedOption = Annotated[
    int | None, typer.Option("--seed", min=0, help="Seed of the run (run.seed).")
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Show the plan and its reasons; start nothing.")
]
VerboseOption = Annotated[
    bool, typer.Option("--verbose", "-v", help="With --dry-run: the origin of every value.")
]
StepsOption = Annotated[
    int | None, typer.Option("--steps", min=1, help="Train up to this step (train.steps).")
]
AddressOption = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="HOST:PORT",
        help="A running Ray cluster (machine.address); else RAY_ADDRESS.",
    ),
]
CheckpointStepOption = Annotated[
    int | None, typer.Option("--step", min=0, help="Which checkpoint; the newest by default.")
]
LoraOption = Annotated[
    int | None,
    typer.Option(
        "--lora", min=1, metavar="RANK", help="Train an adapter of this rank (train.lora.rank)."
    ),
]
AdapterOption = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="NAME=FILE",
        help="One of several adapters, trained at once: what it has other than the recipe.",
    ),
]
OnOption = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="MACHINE|FILE",
        help="With --dry-run or --emit: plan for it, as 16x8xMI355X.",
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
    JobForm | None, typer.Option("--emit", help="Print the plan as a job script; start nothing.")
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
        help="GPUs per node (machine.gpus); bare or all: all visible; 0: the CPU.",
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
        raise typer.BadParameter(
            "--emit and --dry-run both show a plan, each in its own way: leave one out"
        )
    if on is not None and not (dry_run or emits):
        raise typer.BadParameter(
            "--on only plans, as a run takes place on the machine that is there: add --dry-run or "
            "--emit"
        )
    if price is not None and not dry_run:
        raise typer.BadParameter("--price-per-gpu-hour only plans: add --dry-run")
    if on is None:
        return None
    from milescli.platform.machine import read_machine

    return read_machine(on)


def verb(
    app: typer.Typer, name: str, *, examples: list[str], is_page: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function as `miles NAME`, with --json and --quiet, and examples below its help.
    `is_page`: it prints a page to read, for which a long one has a pager."""
    epilog = "\n".join(["Examples:", *examples])

    def register(function: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(function, eval_str=True)

        @wraps(function)
        def run(*args: object, json_mode: bool, quiet: bool, **kwargs: object) -> None:
            context = cast(typer.Context, kwargs["context"])
            with paged(context.obj) if is_page else nullcontext():
                function(*args, **kwargs)  # the single door has read both: see app.main

        extra = [
            inspect.Parameter(
                "json_mode", inspect.Parameter.KEYWORD_ONLY, annotation=JsonOption, default=False
            ),
            inspect.Parameter(
                "quiet", inspect.Parameter.KEYWORD_ONLY, annotation=QuietOption, default=False
            ),
        ]
        parameters = [*signature.parameters.values(), *extra]
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        about = " ".join((function.__doc__ or "").split())  # else its lines are kept as lines
        run.__doc__, first = about, about.partition(". ")[0].rstrip(".") + "."
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        app.command(name, epilog=epilog, short_help=first)(run)
        return function

    return register


def flags_of(**options: tuple[str, object]) -> dict[str, str]:
    """Return the flags that were given, by recipe key: `flags_of(train__steps=("--steps", 4))` ->
    {"train.steps": "--steps 4"}; an option that is None was not given."""
    return {
        key.replace("__", "."): f"{option} {value}"
        for key, (option, value) in options.items()
        if value is not None
    }


def here() -> dict[str, object]:
    """Return the surroundings that loading a recipe needs."""
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
        _named(positional, option), sets=sets or [], flags=flags, further=further, **here()
    )
    for warning in loaded.warnings:
        output.warn(warning)
    return loaded


def _named(positional: str | None, option: str | None) -> str:
    if positional is not None and option is not None and positional != option:
        raise typer.BadParameter(f"`{positional}` and `--recipe {option}` name two recipes")
    recipe = positional or option
    if not recipe:
        raise typer.BadParameter(
            "say which --recipe, e.g. `miles launch quickstart`; `miles recipes` lists all"
        )
    return recipe


SubjectArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN|CHECKPOINT|MODEL|URL",
        help="A run, one of its checkpoints (RUN@STEP, or its folder), a model's folder or name on "
        "the hub, or an endpoint.",
        autocompletion=suggest.runs,
        show_default=False,
    ),
]
DataOption = Annotated[
    list[str] | None,
    typer.Option("--data", "-d", metavar="[NAME=]FILE", help="Other prompts; repeatable."),
]
StepsListOption = Annotated[
    str | None,
    typer.Option("--steps", metavar="N,N|all", help="Several checkpoints, one engine start."),
]
NumPromptsOption = Annotated[
    int | None, typer.Option("--num-prompts", min=1, help="The first N prompts of each set.")
]
SamplesOption = Annotated[
    int | None, typer.Option("--samples", min=1, help="Samples of each prompt.")
]
TemperatureOption = Annotated[
    float | None, typer.Option("--temperature", min=0.0, help="0: greedy.")
]
KOption = Annotated[
    list[int] | None, typer.Option("-k", min=1, help="Of pass@k and maj@k; repeatable.")
]
DomainOption = Annotated[
    str | None, typer.Option("--domain", metavar="COLUMN", help="Accuracy by this column.")
]
AgainstOption = Annotated[
    str | None,
    typer.Option(
        "--against",
        metavar="RUN|MODEL|URL|FILE",
        help="Another, measured now or before: which is better?",
    ),
]
OutOption = Annotated[
    Path | None,
    typer.Option("--out", help="Where results of a MODEL go; else below the runs."),
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
    ExportRole, typer.Option("--role", help="Which of the models that a run trains.")
]
FormatOption = Annotated[
    Format | None,
    typer.Option("--format", "-f", help="Numbers of the weights; as config.json says by default."),
]
BaseOption = Annotated[
    Path | None,
    typer.Option("--base", help="The model that an adapter or a bare checkpoint is of."),
]
MergeOption = Annotated[bool, typer.Option("--merge", help="Write an adapter into its base model.")]
PushOption = Annotated[
    str | None,
    typer.Option("--push", metavar="ORG/NAME", help="Upload it to the Hugging Face hub."),
]
PrivateOption = Annotated[
    bool, typer.Option("--private/--public", help="Who may see a repository that --push makes.")
]
