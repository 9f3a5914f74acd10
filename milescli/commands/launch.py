"""`miles launch`: start a run, or show what would run."""

from __future__ import annotations

import typer

from milescli.commands.driving import SupervisedOption, begin, drive
from milescli.commands.options import (
    AdapterOption,
    AddressOption,
    DryRunOption,
    EmitOption,
    GpusOption,
    LoraOption,
    NameOption,
    NodesOption,
    OnOption,
    PriceOption,
    RecipeArgument,
    RecipeOption,
    SeedOption,
    SetOption,
    StepsOption,
    VerboseOption,
    flags_of,
    planned_machine,
    read_recipe,
    verb,
)
from milescli.console.output import Output

EXAMPLES = [
    "miles launch quickstart",
    "miles launch my.yaml --gpus 8 --lora 32 --set rollout.samples_per_prompt=16 --supervised",
    "miles launch --recipe qwen3.6 --on 4x8xH200 --emit slurm > job.sh",
]


@verb("launch", examples=EXAMPLES)
def launch(
    context: typer.Context,
    wanted: RecipeArgument = None,
    *,
    recipe: RecipeOption = None,
    name: NameOption = None,
    sets: SetOption = None,
    gpus: GpusOption = None,
    nodes: NodesOption = None,
    address: AddressOption = None,
    steps: StepsOption = None,
    seed: SeedOption = None,
    lora: LoraOption = None,
    adapters: AdapterOption = None,
    dry_run: DryRunOption = False,
    on: OnOption = None,
    emit: EmitOption = None,
    price: PriceOption = None,
    verbose: VerboseOption = False,
    supervised: SupervisedOption = False,
) -> None:
    """Train a model from a recipe."""
    output: Output = context.obj
    machine = planned_machine(on, price=price, dry_run=dry_run, emits=emit is not None)
    flags = flags_of(
        run__name=("--name", name),
        machine__gpus=("--gpus", gpus),
        machine__nodes=("--nodes", nodes or (len(machine.nodes) if machine else None)),
        machine__address=("--address", address),
        train__steps=("--steps", steps),
        run__seed=("--seed", seed),
        train__lora__rank=("--lora", lora),
    )
    if verbose and not dry_run:
        raise typer.BadParameter("--verbose shows more of a plan: add --dry-run")
    loaded = read_recipe(wanted, recipe, sets=sets, flags=flags, adapters=adapters, output=output)
    if emit is not None:
        from milescli.commands.show.job import show_job

        show_job(loaded, form=emit.value, machine=machine, on=on, output=output)
    elif dry_run:
        from milescli.commands.show.plan import show_plan
        from milescli.runtime.dry_run import dry_run as plan_for

        plan = plan_for(loaded, machine, output=output)
        show_plan(plan, loaded, output=output, with_origins=verbose, price_per_gpu_hour=price)
    else:
        drive(lambda: begin(loaded, output=output), output=output, supervised=supervised)
