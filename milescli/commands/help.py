"""`miles help`: pages that no option list can hold: exit codes, recipe keys, the run directory."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from milescli.commands.options import verb
from milescli.console.output import Output
from milescli.core.errors import EXIT_CODE_MEANINGS

EXAMPLES = ["miles help exit-codes", "miles help recipe", "miles help run-directory"]

RUN_DIRECTORY = {
    "recipe.yaml": "the whole recipe, each value with its origin; `miles launch --recipe FILE` "
    "takes it",
    "plan.json": "what ran where, and why",
    "manifest.json": "versions, data hash, seeds",
    "events.jsonl": "everything that happened, one JSON object a line",
    "metrics.jsonl": "the scalars of every step",
    "tensorboard/": "the same, for `tensorboard --logdir`",
    "run.svg": "a picture of the last frame, to show around",
    "logs/attempt_N/": "one log for each process; `logs/latest` is the newest attempt",
    "checkpoints/step_N/": "Megatron's torch_dist format; complete where it has a manifest.json",
    "rollouts/": "some answers of each step, to read",
    "eval/": "the answers of each evaluation",
    "model/, data/": "the model and the prompts that miles made itself, where the recipe asks for "
    "them",
}


class Topic(StrEnum):
    """The pages."""

    EXIT_CODES = "exit-codes"
    RECIPE = "recipe"
    RUN_DIRECTORY = "run-directory"


TOPICS = {
    Topic.EXIT_CODES: "what the process says when it ends",
    Topic.RECIPE: "every key of a recipe: type, default, meaning",
    Topic.RUN_DIRECTORY: "what lies in runs/NAME",
}


def register(app: typer.Typer) -> None:
    """Add the verb."""
    verb(app, "help", examples=EXAMPLES)(help_page)


def help_page(
    context: typer.Context,
    topic: Annotated[Topic | None, typer.Argument(help="Which page.", show_default=False)] = None,
) -> None:
    """Show a page: exit-codes, recipe or run-directory."""
    output: Output = context.obj
    if topic is Topic.EXIT_CODES:
        codes = [(int(code), meaning) for code, meaning in EXIT_CODE_MEANINGS.items()]
        output.json(
            "exit_codes",
            {"exit_codes": [{"code": code, "meaning": meaning} for code, meaning in codes]},
        )
        output.table(["code", "meaning"], codes)
    elif topic is Topic.RECIPE:
        from milescli.commands.show_keys import show_keys

        show_keys(output)
    elif topic is Topic.RUN_DIRECTORY:
        output.json("run_directory", {"files": RUN_DIRECTORY})
        output.kv(RUN_DIRECTORY, title="runs/NAME/")
    else:
        output.json("help", {"topics": {str(name): text for name, text in TOPICS.items()}})
        output.table(
            ["page", "what it tells"],
            [(f"miles help {name}", text) for name, text in TOPICS.items()],
        )
