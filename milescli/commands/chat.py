"""`miles chat`: talk to a checkpoint of a run, or to a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from milescli.commands.options import SetOption, SubjectArgument, verb
from milescli.console.output import Output

if TYPE_CHECKING:
    from milescli.rollout.base import Reply

EXAMPLES = [
    "miles chat quickstart-1",
    "miles chat quickstart-1@0    # before the first step",
    "miles chat Qwen/Qwen3-0.6B --temperature 0.7 --logprobs",
    "echo 'What is 2 + 2?' | miles chat quickstart-1 --quiet",
]


@verb("chat", examples=EXAMPLES)
def chat(
    context: typer.Context,
    subject: SubjectArgument,
    *,
    system: Annotated[str, typer.Option("--system", help="System message.")] = "",
    temperature: Annotated[
        float | None,
        typer.Option("--temperature", min=0.0, help="Sampling temperature; 0: greedy."),
    ] = None,
    reply_tokens: Annotated[
        int, typer.Option("--reply-tokens", min=1, help="Longest reply, in tokens.")
    ] = 512,
    tokens: Annotated[
        int, typer.Option("--tokens", min=1, help="Limit on all replies, in tokens.")
    ] = 2048,
    logprobs: Annotated[
        bool, typer.Option("--logprobs", help="Show the log-prob of each token.")
    ] = False,
    sets: SetOption = None,
) -> None:
    """Chat with a run's checkpoint (RUN or RUN@STEP), a folder, or a name on the hub."""
    from milescli.commands import measure
    from milescli.commands.find_run import find_eval_target
    from milescli.runtime.evaluation.chat import SETTINGS, Chat, next_line
    from milescli.runtime.evaluation.sets import EvalOptions

    output: Output = context.obj
    if find_eval_target(subject).endpoint is not None:
        raise typer.BadParameter("`chat` starts engines for a model, so it cannot take an endpoint")
    settings = SETTINGS | {
        "rollout.max_response_tokens": str(tokens),
        "rollout.max_turn_tokens": str(min(reply_tokens, tokens)),
        "eval.max_response_tokens": str(tokens),
    }
    if temperature is not None:
        settings["eval.temperature"] = str(temperature)
    changes = [*(f"{key}={value}" for key, value in settings.items()), *(sets or ())]

    def show_reply(reply: Reply, pieces: Sequence[tuple[str, float]]) -> None:
        text = str(reply.message.get("content") or reply.turn.text)
        shown = [{"token": piece, "logprob": value} for piece, value in pieces]
        output.json("reply", {"text": text, "tokens": shown})
        output.text(text)
        if logprobs:
            output.table(["token", "logprob"], [(repr(piece), f"{v:.3f}") for piece, v in pieces])

    def refuse(why: str) -> None:
        output.json("refusal", {"text": why})
        output.warn(f"{why}; a larger --tokens makes room")

    conversation = Chat(
        read=lambda: next_line(output),
        show_reply=show_reply,
        note=output.note,
        refuse=refuse,
        piece=output.piece if output.is_watched else None,
        system=system,
    )
    eval_options = EvalOptions(data=["task:seeds"], sets=changes)
    measure.measure_subject(
        subject,
        eval_options,
        measure.MeasureOptions(use_engines=conversation.use_engines),
        output=output,
    )
