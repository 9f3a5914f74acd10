"""`miles eval`: measure checkpoints of a run on sets of prompts."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from milescli.commands.find_run import find_run
from milescli.commands.options import AddressOption, RunArgument, SetOption, flags_of, verb
from milescli.console.output import Output

EXAMPLES = [
    "miles eval quickstart-1",
    "miles eval quickstart-1 --step 20 --num-prompts 50",
    "miles eval quickstart-1 --data test.jsonl --data hard=hard.jsonl",
    "miles eval quickstart-1 --steps all --samples 8 --temperature 0.7 -k 1 -k 8",
]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    verb(app, "eval", examples=EXAMPLES)(evaluate)


def evaluate(
    context: typer.Context,
    run: RunArgument,
    *,
    data: Annotated[
        list[str] | None,
        typer.Option("--data", "-d", metavar="[NAME=]FILE", help="Other prompts; repeatable."),
    ] = None,
    step: Annotated[
        int | None, typer.Option("--step", min=0, help="Which checkpoint; the newest by default.")
    ] = None,
    steps: Annotated[
        str | None,
        typer.Option("--steps", metavar="N,N|all", help="Several checkpoints, one engine start."),
    ] = None,
    num_prompts: Annotated[
        int | None, typer.Option("--num-prompts", min=1, help="The first N prompts of each set.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option("--samples", min=1, help="Samples of each prompt.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", min=0.0, help="0: greedy.")
    ] = None,
    k: Annotated[
        list[int] | None, typer.Option("-k", min=1, help="Of pass@k and maj@k; repeatable.")
    ] = None,
    domain: Annotated[
        str | None, typer.Option("--domain", metavar="COLUMN", help="Accuracy by this column.")
    ] = None,
    sets: SetOption = None,
    address: AddressOption = None,
) -> None:
    """Measure a run on its held-out prompts, or on others."""
    if step is not None and steps is not None:
        raise typer.BadParameter("--step is one checkpoint, --steps are several: leave one out")
    folder = find_run(run)
    from milescli.commands.show_eval import show_results
    from milescli.runtime.eval_sets import EvalWish
    from milescli.runtime.evaluate import evaluate_run

    output: Output = context.obj
    wish = EvalWish(
        data=data or [],
        ks=k or [],
        domain=domain,
        sets=sets or [],
        flags=flags_of(
            eval__num_prompts=("--num-prompts", num_prompts),
            eval__samples_per_prompt=("--samples", samples),
            eval__temperature=("--temperature", temperature),
            machine__address=("--address", address),
        ),
    )
    results = evaluate_run(
        folder,
        steps=steps if step is None else str(step),
        wish=wish,
        environ=os.environ,
        output=output,
    )
    show_results(results, folder=folder, output=output)
