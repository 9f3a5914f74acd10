"""`miles eval`: measure a model, or checkpoints of a run, on sets of prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from milescli.commands import suggest
from milescli.commands.options import AddressOption, SetOption, flags_of, verb
from milescli.console.output import Output

EXAMPLES = [
    "miles eval quickstart-1",
    "miles eval quickstart-1 --step 20 --num-prompts 50",
    "miles eval quickstart-1 --data test.jsonl --data hard=hard.jsonl",
    "miles eval Qwen/Qwen3-0.6B --data test.jsonl --set rollout.reward=math",
    "miles eval quickstart-1 --against quickstart-2",
    "miles eval quickstart-1 --steps all --samples 8 --temperature 0.7 -k 1 -k 8",
]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    verb(app, "eval", examples=EXAMPLES)(evaluate)


def evaluate(
    context: typer.Context,
    subject: Annotated[
        str,
        typer.Argument(
            metavar="RUN|CHECKPOINT|MODEL",
            help="A run, one of its checkpoints, a model's folder, or its name on the hub.",
            autocompletion=suggest.runs,
            show_default=False,
        ),
    ],
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
    against: Annotated[
        str | None,
        typer.Option(
            "--against", metavar="RUN|MODEL|FILE", help="What was measured before: which is better?"
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Where results of a MODEL go; else below the runs."),
    ] = None,
    sets: SetOption = None,
    address: AddressOption = None,
) -> None:
    """Measure a model, or a run's checkpoints, on sets of prompts."""
    if step is not None and steps is not None:
        raise typer.BadParameter("--step is one checkpoint, --steps are several: leave one out")
    from milescli.commands import measure
    from milescli.commands.show_eval import show_comparisons, show_results
    from milescli.runtime.eval_compare import comparisons
    from milescli.runtime.eval_sets import EvalWish

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
    options = measure.Options(steps=steps if step is None else str(step), out=out)
    if against is not None:
        wish = measure.against(against, wish)
    folder, results = measure.measured(subject, wish, options, output=output)
    show_results(results, folder=folder, output=output)
    if against is not None:
        show_comparisons(comparisons(results, wish.against), output=output)
