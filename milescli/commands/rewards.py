"""`miles rewards`: try a reward on the samples that a run kept."""

from __future__ import annotations

from typing import Annotated

import typer

from milescli.commands.find_run import find_run, newest_run
from milescli.commands.options import (
    Group,
    RunArgument,
    SetOption,
    fixes_in_words_of,
    verb,
)
from milescli.console.output import Output

TRY_EXAMPLES = [
    "miles rewards try quickstart-1 --reward math",
    "miles rewards try quickstart-1 --reward mypkg.rewards:strict --last 20 --show 10",
]
AGREE_EXAMPLES = ["miles rewards agree gsm8k math --run quickstart-1"]
PAGE = """\
miles rewards: try a reward on the samples that a run kept

  miles rewards try RUN --reward NAME     compare it with the rewards that the run recorded
  miles rewards agree NAME NAME --run RUN compare two rewards on the same samples

Both score texts only: they start no engine and use no device.
"""
RewardArgument = Annotated[str, typer.Argument(metavar="REWARD", show_default=False)]
RewardOption = Annotated[
    str,
    typer.Option(
        "--reward",
        metavar="REWARD",
        help="The reward to try, as rollout.reward takes it.",
        show_default=False,
    ),
]
RunOption = Annotated[
    str | None, typer.Option("--run", metavar="RUN", help="The run; the newest by default.")
]
LastOption = Annotated[
    int | None, typer.Option("--last", min=1, help="Only samples of the newest LAST steps.")
]
ShowOption = Annotated[
    int, typer.Option("--show", min=0, help="Number of samples to show whose reward changes most.")
]
RightOption = Annotated[
    float, typer.Option("--right-above", help="A sample is right if its reward is above this.")
]


GROUP = Group("rewards", about="Try a reward on the samples that a run kept.", page=PAGE)


@verb("try", examples=TRY_EXAMPLES, group=GROUP)
def try_reward(
    context: typer.Context,
    run: RunArgument,
    *,
    reward: RewardOption,
    sets: SetOption = None,
    last: LastOption = None,
    show: ShowOption = 5,
    right_above: RightOption = 0.0,
) -> None:
    """Score a run's kept samples with another reward: what changes, agreement, suspected hacks,
    and advantages."""
    from milescli.commands.show.rewards import show_comparison
    from milescli.runtime.evaluation.rescore import compare_rewards

    pair, path = (None, reward), find_run(run)
    with fixes_in_words_of("--reward ", instead_of="--set rollout.reward="):
        compared = compare_rewards(
            path, rewards=pair, sets=sets or [], last=last, right_above=right_above
        )
    show_comparison(compared, num_flips=show, output=context.obj)


@verb("agree", examples=AGREE_EXAMPLES, group=GROUP)
def agree(
    context: typer.Context,
    a: RewardArgument,
    b: RewardArgument,
    *,
    run: RunOption = None,
    sets: SetOption = None,
    last: LastOption = None,
    show: ShowOption = 5,
    right_above: RightOption = 0.0,
) -> None:
    """Compare two rewards on the samples that a run kept."""
    from milescli.commands.show.rewards import show_comparison
    from milescli.runtime.evaluation.rescore import compare_rewards

    output: Output = context.obj
    path = newest_run(run)
    compared = compare_rewards(
        path, rewards=(a, b), sets=sets or [], last=last, right_above=right_above
    )
    show_comparison(compared, num_flips=show, output=output)
