"""Options and the argument of `miles eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from milescli.commands import suggest

SubjectArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN|CHECKPOINT|MODEL|URL",
        help="A run, one of its checkpoints, a model's folder or name on the hub, or an endpoint.",
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
