"""`miles serve`: an OpenAI-compatible endpoint for a checkpoint of a run, or for a model; or, with
--recipe, training and sampling for clients of the Tinker API."""

from __future__ import annotations

from typing import Annotated

import typer

from milescli.commands.options import (
    GpusOption,
    HostOption,
    LoraOption,
    OptionalSubjectArgument,
    RecipeOption,
    SetOption,
    flags_of,
    verb,
)

EXAMPLES = [
    "miles serve quickstart-1",
    "miles serve quickstart-1@20 --port 8001",
    "miles serve Qwen/Qwen3-0.6B --tokens 4096",
    "miles serve --recipe qwen3-0.6b --lora 32",
]
PORT, TOKENS = 8000, 2048


@verb("serve", examples=EXAMPLES)
def serve(
    context: typer.Context,
    subject: OptionalSubjectArgument = None,
    *,
    host: HostOption = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(
            "--port", min=0, max=65535, help=f"Port, by default {PORT}; 0: any free port."
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option("--tokens", min=1, help=f"Longest response in tokens, by default {TOKENS}."),
    ] = None,
    sets: SetOption = None,
    recipe: RecipeOption = None,
    lora: LoraOption = None,
    gpus: GpusOption = None,
    name: Annotated[
        str | None,
        typer.Option("--name", "-n", help="Name of the service, whose saved states it keeps."),
    ] = None,
    keys: Annotated[
        str | None,
        typer.Option("--keys", metavar="FILE", help="Clients: a line NAME KEY for each."),
    ] = None,
) -> None:
    """Serve a run's checkpoint (RUN or RUN@STEP), a folder, or a name on the hub, to OpenAI's
    clients; with --recipe, train and sample for clients of the Tinker API. Ctrl-C stops it."""
    from milescli.commands import serving

    if (subject is None) == (recipe is None):
        raise typer.BadParameter("name what is served, or a recipe to train by: --recipe NAME|FILE")
    place = serving.ListenAddress(host=host, port=port, usual=PORT)
    if subject is not None:
        if lora or gpus or name or keys:
            raise typer.BadParameter("--lora, --gpus, --name and --keys apply to --recipe")
        serving.serve_model(subject, place, tokens=tokens or TOKENS, sets=sets, output=context.obj)
        return
    if tokens is not None:
        raise typer.BadParameter("with --recipe, say --set rollout.max_response_tokens=N")
    flags = flags_of(machine__gpus=("--gpus", gpus), train__lora__rank=("--lora", lora))
    serving.serve_clients(
        recipe, place, name=name, keys=keys, flags=flags, sets=sets, output=context.obj
    )
