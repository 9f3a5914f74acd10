"""Implements `miles serve --recipe`: starts a service from a recipe that answers until a signal.
Trainer and engines are those of a run that trains several adapters; here clients decide what they
do."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING

import uvicorn

from milescli.agents.proxy import QuietServer
from milescli.checkpoint.run_dir import RunDir
from milescli.cluster.nodes import find_nodes
from milescli.console.output import Output
from milescli.core.errors import FitError, RecipeError
from milescli.core.events import EventBus
from milescli.core.types import ROLLOUT
from milescli.core.units import format_bytes
from milescli.plan.memory import trained_shape
from milescli.plan.types import Plan
from milescli.platform.cpu import available_memory
from milescli.platform.torch_wheel import require_wheel
from milescli.recipe.data import Data
from milescli.recipe.evaluation import Evaluation
from milescli.recipe.load import LoadedRecipe
from milescli.recipe.rollout import Rollout
from milescli.recipe.schema import Recipe, Warmup
from milescli.recipe.train import Train
from milescli.runtime.evaluation.serve import NO_STOP
from milescli.runtime.inputs.model_facts import planned_facts
from milescli.runtime.inputs.run_inputs import inputs_of_model
from milescli.runtime.launch import with_absolute_paths
from milescli.runtime.planning import plan_without_plugins, refuse_unproven, replan_fetched
from milescli.runtime.prestart import Prestarted, prestart_engines
from milescli.runtime.recovery.orphans import locked_without_orphans
from milescli.runtime.spec import RunSpec

if TYPE_CHECKING:
    from milescli.runtime.build import Builder
    from milescli.runtime.recovery.engines import Engines
    from milescli.runtime.recovery.restarts import Repairs
    from milescli.runtime.service.futures import Futures
    from milescli.runtime.service.samplers import Samplers
    from milescli.runtime.service.trainer import ServiceTrainer

FOLDER = "services"
"""Folder below the folder of runs."""
RANK_TARGET = "milescli.backends.megatron.service_rank:ServiceRank"
NUM_SLOTS = 8
"""Saved adapters that engines hold at a time, by default."""
SLOT = "slot"
"""Prefix of the engines' names of adapters."""
RECOVERY = "recovery"
"""Folder in that of the service that holds trained adapters for restarted ranks."""
FORGET_EVERY_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """Holds the options of a service, besides its recipe."""

    name: str
    """Folder of the service, below `services` in that of runs."""
    num_slots: int
    """Saved adapters that engines hold at a time."""
    keys: Mapping[str, str]
    """Key -> tenant."""
    listener: socket
    """Socket for requests; those that arrive before the service is ready wait."""
    ready: Callable[[str, Path], None]
    """Called once with the base model's name and the service's folder, when it answers."""


def serve_training(loaded: LoadedRecipe, options: ServiceOptions, *, output: Output) -> None:
    """Serve until Ctrl-C, SIGTERM or SIGHUP. Saved states stay in the service's folder, from which
    a later server of this name continues. Raises MilesError."""
    loaded = with_absolute_paths(loaded)
    loaded = replace(loaded, recipe=_service_recipe(loaded.recipe, num_slots=options.num_slots))
    recipe = loaded.recipe
    facts = planned_facts(recipe)
    refuse_unproven(recipe, facts)
    nodes = find_nodes(loaded, output=output)
    plan = plan_without_plugins(loaded, nodes.machine, facts=facts)
    require_wheel(plan.device_kind)
    _require_planned(plan)
    folder = Path(recipe.run.dir).expanduser().absolute() / FOLDER / options.name
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    run = RunDir(folder)
    with (
        locked_without_orphans(run, output=output),
        prestart_engines(recipe, plan, facts, address=nodes.address) as prestarted,
    ):
        from milescli.runtime.build import FOLDER as BLANK

        inputs = inputs_of_model(recipe, run, output=output)
        plan = replan_fetched(plan, loaded, nodes.machine, inputs.facts, output=output)
        _require_planned(plan)
        # an earlier server of this name may have had adapters of another shape
        shutil.rmtree(run.path / BLANK, ignore_errors=True)
        spec = RunSpec(run=run, recipe=recipe, plan=plan, nodes=nodes, inputs=inputs)
        _serve(spec, options, prestarted, output=output)


def _service_recipe(recipe: Recipe, *, num_slots: int) -> Recipe:
    """Return a recipe with the same model, machine and adapter, and without everything else of a
    run: clients choose losses, data and optimizer settings. Raises RecipeError."""
    train = recipe.train
    faults: dict[str, tuple[bool, str, str]] = {
        "no adapter": (not train.lora.is_on, "clients train adapters of one shape", "--lora 32"),
        f"`train.optimizer.rule={train.optimizer.rule}`": (
            train.optimizer.rule != "adamw",
            "clients send settings of AdamW",
            "--set train.optimizer.rule=adamw",
        ),
        "`train.lora.publish=merged`": (
            train.lora.publish == "merged",
            "engines hold adapters of several clients beside one model",
            "--set train.lora.publish=adapter",
        ),
        "`train.lora.dropout`": (
            train.lora.dropout > 0,
            "clients compare log-probs of trainer and engine",
            "--set train.lora.dropout=0",
        ),
        "a model from scratch": (
            recipe.model.scratch is not None,
            "an adapter changes little, so its base model must already be trained",
            "--set model.scratch=null --set model.path=FOLDER",
        ),
        "`model.adapter`": (
            recipe.model.adapter is not None,
            "each client begins with an adapter of its own",
            "--set model.adapter=null",
        ),
    }
    for what, (is_so, why, fix) in faults.items():
        if is_so:
            raise RecipeError(f"a recipe with {what} cannot be served to clients", why=why, fix=fix)
    kept = Train().model_copy(
        update={
            name: getattr(train, name)
            for name in ("lora", "optimizer", "precision", "exempt", "max_tokens_per_microbatch")
        }
    )
    rollout = Rollout().model_copy(
        update={
            "max_response_tokens": recipe.rollout.max_response_tokens,
            "prompts_per_step": recipe.rollout.prompts_per_step,
            "samples_per_prompt": recipe.rollout.samples_per_prompt,
            "stop": [NO_STOP],
        }
    )
    data = Data().model_copy(update={"max_prompt_tokens": recipe.data.max_prompt_tokens})
    changes = {"train": kept, "rollout": rollout, "data": data, "eval": Evaluation()}
    fault = recipe.fault.model_copy(update={"copy_every": 0})
    slots = {f"{SLOT}-{number}": {} for number in range(num_slots)}
    return recipe.model_copy(
        update={**changes, "warmup": Warmup(), "fault": fault, "adapters": slots}
    )


def _require_planned(plan: Plan) -> None:
    """Raise FitError if the plan has a layout that is not supported here yet."""
    if any(slot.node for slot in plan.slots):
        raise FitError(
            "the plan has several computers",
            why="a service sends adapters to engines through the memory of its own computer",
            fix="--set machine.nodes=1",
        )
    if plan.colocated and plan.device_kind != "cpu":
        raise FitError(
            "the plan has trainer and engine on the same device",
            why="clients train and sample at the same time, so each needs a device of its own",
            fix="--gpus 2",
        )


def _serve(
    spec: RunSpec, options: ServiceOptions, prestarted: Prestarted, *, output: Output
) -> None:
    from milescli.runtime.adapters import AllFleets
    from milescli.runtime.recovery.engine_keepers import Start, keep_engines
    from milescli.runtime.recovery.engines import Engines
    from milescli.runtime.recovery.restarts import retry_start
    from milescli.runtime.recovery.supervise import StopSignals, run_watched
    from milescli.runtime.service.futures import Futures
    from milescli.runtime.service.trainer import ServiceTrainer
    from milescli.runtime.session import open_session

    output.note("starting trainer and engines")
    with open_session(spec, prestarted=prestarted, log_dir=spec.run.new_attempt()) as session:
        session.builder.trainer_target = RANK_TARGET
        engines, probes = Engines(), [session.ray.check]

        async def work() -> None:
            builder, settings = session.builder, spec.recipe.machine
            await session.resources.take(timeout_s=settings.start_timeout_s)
            probes.append(session.cluster.check_nodes)
            futures = Futures(output.warn)
            repairs = _repairs(spec, lambda: futures.num_ended, output=output)
            started = partial(retry_start, repairs=repairs)
            start_ranks = partial(builder.start_trainer, with_teachers=False)
            ranks, _ = await asyncio.gather(
                started("trainer", start_ranks),
                builder.start_engines(engines, retry_start=started),
            )
            samplers = _samplers(builder, engines)

            async def join(start: Start) -> None:
                await samplers.admit(await start())

            everyone = AllFleets(samplers.fleets)
            keep_engines(everyone, ROLLOUT, engines, builder, repairs=repairs, join=join)
            trainer = ServiceTrainer(
                ranks,
                restart=start_ranks,
                repairs=replace(repairs, step=lambda: trainer.progress),
                silence_s=settings.silence_s,
                folder=spec.run.path / RECOVERY,
            )
            probes.extend([engines.probe, trainer.probe])
            try:
                await _serve_clients(spec, options, trainer, samplers, futures, output=output)
            finally:
                await trainer.close()

        async def main() -> None:
            try:
                signals = StopSignals(on_stop=lambda: False, resume_command=lambda: "miles serve")
                await run_watched(work(), probes, signals, cause_grace_s=session.cause_grace_s)
            finally:
                await engines.stop()
                await session.resources.release()

        outcome = "failed"
        try:
            asyncio.run(main())
            outcome = "done"
        finally:
            verdict = {"outcome": outcome, "step": 0, "error": None}
            session.verdict_file.write_text(json.dumps(verdict) + "\n", encoding="utf-8")


def _repairs(spec: RunSpec, num_requests: Callable[[], int], *, output: Output) -> Repairs:
    """Return the limits of restarts. `num_requests`: returns the number of finished requests."""
    from milescli.runtime.recovery.engine_keepers import warn_of_losses
    from milescli.runtime.recovery.restarts import Repairs, Restarts

    bus = EventBus([warn_of_losses(output.warn, note=output.note)])
    restarts = Restarts(limits=spec.recipe.fault, unit="request")
    return Repairs(bus=bus, restarts=restarts, step=num_requests)


def _samplers(builder: Builder, engines: Engines) -> Samplers:
    from milescli.runtime.service.samplers import Samplers

    slots = dict(zip(builder.recipe.adapters, builder.slot_fleets(engines), strict=True))
    return Samplers(builder.base_fleet(engines), slots)


async def _serve_clients(
    spec: RunSpec,
    options: ServiceOptions,
    trainer: ServiceTrainer,
    samplers: Samplers,
    futures: Futures,
    *,
    output: Output,
) -> None:
    """Serve clients until a signal cancels this, which is the expected end."""
    from milescli.runtime.service.app import Api
    from milescli.runtime.service.clients import MAX_ADAPTERS, Clients, ServiceModel
    from milescli.runtime.service.datums import Limits
    from milescli.runtime.service.states import States

    shape, facts = trained_shape(spec.recipe), spec.inputs.facts
    assert shape is not None, "a recipe with an adapter"
    served = ServiceModel(
        name=spec.recipe.model.path or str(spec.inputs.model_dir),
        model_dir=spec.inputs.model_dir,
        facts=facts,
        shape=shape,
        limits=Limits(plan=spec.plan, vocab_size=facts.vocab_size),
    )
    states = States(spec.run.path / "states")
    states.clean()
    clients = Clients(service_model=served, trainer=trainer, samplers=samplers, states=states)
    each = await clients.limit_adapters(available_memory())
    if clients.max_adapters < MAX_ADAPTERS:
        output.warn(
            f"main memory has room for {clients.max_adapters} adapters of {format_bytes(each)}, "
            f"not for {MAX_ADAPTERS}"
        )
    app = Api(clients=clients, futures=futures, keys=options.keys).app()
    server = QuietServer(
        uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1
        )
    )
    answering = asyncio.create_task(server.serve(sockets=[options.listener]))
    options.ready(served.name, spec.run.path)
    try:
        with suppress(asyncio.CancelledError):
            while True:
                await asyncio.sleep(FORGET_EVERY_S)
                await clients.end_silent_sessions(output.note)
    finally:
        server.should_exit = True
        await futures.close()
        await answering
        await samplers.close()
