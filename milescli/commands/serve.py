"""`miles serve`: an OpenAI-compatible endpoint for a checkpoint of a run, or for a model."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from milescli.commands.options import SetOption, SubjectArgument, verb
from milescli.console.output import Output

EXAMPLES = [
    "miles serve quickstart-1",
    "miles serve quickstart-1@20 --port 8001",
    "miles serve Qwen/Qwen3-0.6B --tokens 4096",
]
PORT = 8000


def register(app: typer.Typer) -> None:
    """Add the verb."""
    verb(app, "serve", examples=EXAMPLES)(serve)


def serve(
    context: typer.Context,
    subject: SubjectArgument,
    *,
    host: Annotated[
        str,
        typer.Option(
            "--host", metavar="ADDRESS", help="Address to listen on; other computers can reach it."
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(
            "--port", min=0, max=65535, help=f"Port, by default {PORT}; 0: any free port."
        ),
    ] = None,
    tokens: Annotated[
        int, typer.Option("--tokens", min=1, help="Longest response, in tokens.")
    ] = 2048,
    sets: SetOption = None,
) -> None:
    """Serve a run's checkpoint (RUN or RUN@STEP), a folder, or a name on the hub, to OpenAI's
    clients. Ctrl-C stops it."""
    from milescli.checkpoint.run_dir import open_run
    from milescli.commands import measure
    from milescli.commands.find_run import find_measured
    from milescli.recipe.resolved import load_resolved
    from milescli.rollout.base import Door
    from milescli.runtime.evaluation.serve import Serving, serve_settings
    from milescli.runtime.evaluation.sets import EvalWish
    from milescli.web.gate import is_loopback
    from milescli.web.serve import address_of, listen

    output: Output = context.obj
    target = find_measured(subject)
    if target.endpoint is not None:
        raise typer.BadParameter(
            "`serve` starts engines for a model, so it cannot take an endpoint"
        )
    run = target.run and load_resolved(open_run(target.run).recipe_file).recipe
    changes = serve_settings(tokens=tokens, has_stop=bool(run and run.rollout.stop))
    with listen(host, port, usual=PORT, command=f"miles serve {subject}") as listener:
        url = f"{address_of(host, listener.getsockname()[1])}/v1"
        if not is_loopback(host):
            output.warn(
                f"other computers can reach {host}: anyone with the key can use the model, and the "
                "traffic is not encrypted"
            )

        def ready(model: str, door: Door) -> None:
            body = {"model": model, "messages": [{"role": "user", "content": "What is 2 + 2?"}]}
            output.json("serve", {"base_url": url, "model": model, "api_key": door.api_key})
            output.text(f"base URL  {url}\nmodel     {model}\nAPI key   {door.api_key}")
            output.text(
                f"curl {url}/chat/completions -H 'Authorization: Bearer {door.api_key}' "
                f"-H 'Content-Type: application/json' -d '{json.dumps(body)}'"
            )
            output.note("Ctrl-C stops the server; the key is new each time")

        serving = Serving(listener=listener, model=target.model, ready=ready)
        wish = EvalWish(data=["task:seeds"], sets=[*changes, *(sets or ())])
        options = measure.Options(ask=serving.ask, verb="serve")
        measure.measured(subject, wish, options, output=output)
    output.note("the server has ended")
