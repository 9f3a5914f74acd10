"""`miles profile`: where the time of a run that goes on is spent."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from typing import Annotated

import typer

from milescli.commands.find_run import find_run
from milescli.commands.options import RunArgument, verb
from milescli.console.output import Output

EXAMPLES = [
    "miles profile quickstart-1",
    "miles profile quickstart-1 --steps 2 --ranks 0,1 --engines 0",
    "miles profile quickstart-1 --memory --json",
]
StepsToTrace = Annotated[
    int, typer.Option("--steps", min=1, max=10, help="Number of steps to profile.")
]
Ranks = Annotated[
    str, typer.Option("--ranks", metavar="N,N", help="Trainer ranks to trace; '' for none.")
]
Engines = Annotated[
    str | None,
    typer.Option(
        "--engines", metavar="N,N", help="Engines to sample; the first by default, '' for none."
    ),
]
Memory = Annotated[bool, typer.Option("--memory", help="Also record what occupies their memory.")]


@verb("profile", examples=EXAMPLES)
def profile(
    context: typer.Context,
    run: RunArgument,
    steps: StepsToTrace = 2,
    ranks: Ranks = "0",
    engines: Engines = None,
    memory: Memory = False,
) -> None:
    """Profile a running run: record traces of trainer ranks and engines to see where the time
    goes."""
    wanted_ranks = _numbers(ranks, "--ranks")
    wanted_engines = None if engines is None else _numbers(engines, "--engines")
    folder = find_run(run)
    from milescli.checkpoint.run_dir import open_run
    from milescli.profiling import request, summary, wait

    output: Output = context.obj
    opened = open_run(folder)
    wait.require_running(
        opened, command=shlex.join(["miles", "profile", run, "--steps", str(steps)])
    )
    plan = wait.plan_of(opened)
    if wanted_engines is None:
        wanted_engines = [0] if plan.engines.num else []
    wait.check(opened, plan, ranks=wanted_ranks, engines=wanted_engines)
    wanted = request.Request(
        number=request.next_number(opened),
        steps=steps,
        ranks=wanted_ranks,
        engines=wanted_engines,
        memory=memory,
    )
    state = wait.request_profile(opened, wanted, tell=output.note)
    result = summary.summarise(opened, wanted, state)
    result.require_some()
    for warning in result.warnings:
        output.warn(warning)
    output.json("profile", asdict(result))
    output.text("\n".join(result.lines()))


def _numbers(text: str, option: str) -> list[int]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise typer.BadParameter(f"{option} takes numbers, for example {option} 0,1: {text!r}")
    return sorted({int(part) for part in parts})
