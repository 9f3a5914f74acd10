"""`miles eval`: measure a model, or checkpoints of a run, on sets of prompts."""

from __future__ import annotations

import typer

from milescli.commands.options import (
    AddressOption,
    AgainstOption,
    CheckpointStepOption,
    DataOption,
    DomainOption,
    KOption,
    NumPromptsOption,
    OutOption,
    SamplesOption,
    SetOption,
    StepsListOption,
    SubjectArgument,
    TemperatureOption,
    flags_of,
    verb,
)
from milescli.console.output import Output

EXAMPLES = [
    "miles eval quickstart-1 --step 20 --num-prompts 50",
    "miles eval quickstart-1 --data test.jsonl --data hard=hard.jsonl",
    "miles eval Qwen/Qwen3-0.6B --data test.jsonl --set rollout.reward=math",
    "miles eval http://127.0.0.1:30000/v1 --data gsm8k",
    "miles eval quickstart-1 --against quickstart-2",
    "miles eval quickstart-1 --steps all --samples 8 --temperature 0.7 -k 1 -k 8",
]


@verb("eval", examples=EXAMPLES)
def evaluate(
    context: typer.Context,
    subject: SubjectArgument,
    *,
    data: DataOption = None,
    step: CheckpointStepOption = None,
    steps: StepsListOption = None,
    num_prompts: NumPromptsOption = None,
    samples: SamplesOption = None,
    temperature: TemperatureOption = None,
    k: KOption = None,
    domain: DomainOption = None,
    against: AgainstOption = None,
    out: OutOption = None,
    sets: SetOption = None,
    address: AddressOption = None,
) -> None:
    """Evaluate a model, or a run's checkpoints, on sets of prompts."""
    if step is not None and steps is not None:
        raise typer.BadParameter(
            "--step selects one checkpoint and --steps several: use only one of them"
        )
    from milescli.commands import measure
    from milescli.commands.find_run import find_eval_target
    from milescli.commands.measure import show_comparisons, show_results
    from milescli.runtime.evaluation.results import compare_results
    from milescli.runtime.evaluation.sets import EvalOptions

    output: Output = context.obj
    eval_options = EvalOptions(
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
    if against is not None:
        find_eval_target(subject)  # or refused before the other is measured
        eval_options = measure.with_comparison(against, eval_options, output=output)
    options = measure.MeasureOptions(steps=steps if step is None else str(step), out=out)
    folder, results = measure.measure_subject(subject, eval_options, options, output=output)
    show_results(results, folder=folder, output=output)
    if against is not None:
        show_comparisons(compare_results(results, eval_options.against), output=output)
