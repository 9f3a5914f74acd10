"""Starts the processes of a run from its spec, each of its vendor's class (the composition root);
also writes the initial adapter for the engines of a LoRA run."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from milescli.backends.ray.actor import ActorHandle, run_all, start_all
from milescli.backends.ray.cluster import Cluster
from milescli.backends.sglang.client.fleet import ORDER_TIMEOUT_S, SglangFleet
from milescli.backends.sglang.launch.arguments import check_extra
from milescli.backends.sglang.launch.spec import EngineSpec, check_servable, check_speculates
from milescli.cluster.resources import NodeResources
from milescli.core.errors import WorkerKilled
from milescli.core.imports import Origin
from milescli.core.plug_points import CHANNELS
from milescli.core.private import secrets_of
from milescli.core.types import EVALUATION, ROLLOUT, EngineAddress
from milescli.export.peft import is_adapter
from milescli.models import table
from milescli.models.adapter import SOLE_ADAPTER, adapter_table
from milescli.plan.collectors import collector_nodes
from milescli.plan.memory import trained_shape
from milescli.plan.types import Plan, Slot, TrainerLayout
from milescli.platform.environment import engine_environment, trainer_environment
from milescli.platform.lazy import torch
from milescli.recipe.schema import Recipe
from milescli.recipe.store_url import variables_of
from milescli.runtime.collecting.process import JournalPart
from milescli.runtime.collecting.share import collector_name, part_of, share_of
from milescli.runtime.engine_folder import engine_folder
from milescli.runtime.inputs.auxiliary_models import weights_place
from milescli.runtime.inputs.run_inputs import RunInputs
from milescli.runtime.planning import engine_spec
from milescli.runtime.recording.sample_journal import SampleJournal
from milescli.runtime.recovery.engines import EngineActors, Engines
from milescli.runtime.recovery.rank_group import RankGroup
from milescli.runtime.spec import RunSpec

TRAINER_TARGET = "milescli.backends.megatron.worker:TrainerRank"
SCORER_TARGET = "milescli.backends.megatron.score_rank:ScoreRank"
SCORER_NAME = "reward model"
COLLECTOR_TARGET = "milescli.runtime.collecting.process:CollectorProcess"
ENGINE_TARGET = "milescli.backends.sglang.launch.server:EngineServer"
RetryStart = Callable[[str, Callable[[], Awaitable[None]]], Awaitable[None]]
"""Calls the function that starts the process of a name, again each time the process is killed
during its start: see `restarts.until_started`."""
PLACE_TIMEOUT_S = 60.0
"""Time for our own Ray session on this computer to reserve the plan's resources."""


async def _start_once(name: str, start: Callable[[], Awaitable[None]]) -> None:
    """Call `start` once, without a retry (a `RetryStart`)."""
    await start()


@dataclass(slots=True, kw_only=True)
class Builder:
    """Starts the processes of one run, whose `resources` are reserved already."""

    spec: RunSpec
    cluster: Cluster
    resources: NodeResources
    log_dir: Path
    warm: Path | None = None
    """Socket at which a warm process starts engines, if there is one; see `prestart`."""
    trainer_target: str = TRAINER_TARGET
    """Class of the trainer's ranks."""

    @property
    def recipe(self) -> Recipe:
        """Return the recipe of the spec."""
        return self.spec.recipe

    @property
    def plan(self) -> Plan:
        """Return the plan of the spec."""
        return self.spec.plan

    async def start_trainer(self, *, with_teachers: bool) -> RankGroup:
        """Start all trainer ranks, with the model loaded, and with the run's teachers if it has
        any. They meet on the node of rank 0."""
        settings, resources, ranks = self.recipe.machine, self.resources, []
        slots = trainer_slots(self.plan)
        master = slots[0].node
        port = (await resources.free_ports(1, node=master))[0]
        for slot in slots:
            arguments = {
                "rank": slot.trainer_rank,
                "world_size": self.plan.trainer.world_size,
                "master_addr": resources.host(master),
                "master_port": port,
                "recipe": self.recipe,
                "plan": self.plan,
                "model_dir": str(self.spec.inputs.model_dir),
                "critic_dir": str(self.spec.inputs.critic_dir)
                if self.spec.inputs.critic_dir
                else None,
                "draft_dir": str(self.spec.inputs.draft_dir)
                if self.recipe.train.draft.is_on
                else None,
                "teacher_dirs": [
                    str(folder) for folder in self.spec.inputs.teacher_dirs if with_teachers
                ],
                "adapters": {name: each.recipe for name, each in self.spec.adapters.items()},
                "channel": CHANNELS.path_of(self.plan.channel) if self.plan.engines.num else None,
                "channel_place": weights_place(self.recipe, self.spec.run),
            }
            ranks.append(
                await self.cluster.spawn(
                    rank_name(slot.trainer_rank or 0),
                    self.trainer_target,
                    node=slot.node,
                    num_gpus=self._gpu_share(),
                    kwargs=arguments,
                    environment=trainer_environment(
                        self.plan, resources.devices([slot]), resources.interfaces(slot.node)
                    ),
                )
            )
        return RankGroup(
            cluster=self.cluster,
            ranks=ranks,
            pids=await self._set_up(ranks),
            layout=self.plan.trainer,
            step_timeout_s=settings.step_timeout_s,
        )

    async def _set_up(self, ranks: list[ActorHandle]) -> list[int]:
        """Wait until all ranks have loaded their models; return their pids by rank. If one fails,
        kill all."""
        timeout_s = self.recipe.machine.start_timeout_s
        try:
            pids = await start_all(ranks, timeout_s=timeout_s, secrets=self._store_variables())
            await run_all(ranks, "setup", timeout_s=timeout_s)
        except BaseException:
            await self.cluster.kill(ranks)
            raise
        return pids

    def _store_variables(self) -> dict[str, str]:
        url = self.recipe.weights.store
        return variables_of(url, os.environ) if url is not None else {}

    async def start_engines(
        self, engines: Engines, *, retry_start: RetryStart = _start_once
    ) -> SglangFleet:
        """Start all engines at once, the reward model if there is one, and the clients. `engines`
        is filled as processes start, so that a failure half-way can still stop them.
        `retry_start`: how to retry a start that is killed."""
        await asyncio.to_thread(write_start, self.spec)
        for index in range(self.plan.engines.num):
            engines.actors[index] = await self._spawn_engine(index)
        starting = [
            retry_start(engine.name, partial(self._start_engine, index, engines))
            for index, engine in engines.actors.items()
        ]
        if self.spec.inputs.reward_model_dir is not None:
            starting.append(retry_start(SCORER_NAME, partial(self._start_scorer, engines)))
        await asyncio.gather(*starting)
        of_rollout = self.engine_addresses(engines)
        engines.fleet = self._fleet(of_rollout)
        for name in self.spec.adapters:
            engines.adapters[name] = self._fleet(of_rollout, adapter=name)
        if of_evaluation := self.engine_addresses(engines, EVALUATION):
            engines.evaluation = self._fleet(of_evaluation)
        for name in self.recipe.rollout.policies:
            served = self.engine_addresses(engines, name)
            engines.policies[name] = self._fleet(served, serves_policy=False)
        return engines.fleet

    async def end_engine(self, dead: EngineActors) -> None:
        """Kill an engine at once, whatever it is doing. Its successor ends the processes that
        remain of it."""
        await dead.stop(grace_s=0.0)
        await self.cluster.kill(dead.handles)

    async def _start_engine(self, index: int, engines: Engines) -> None:
        """Start the engine that was spawned; if it is killed meanwhile, spawn another in its place
        and raise WorkerKilled."""
        engine, timeout_s = engines.actors[index], self.recipe.machine.start_timeout_s
        try:
            await engine.start(timeout_s=timeout_s)
            await engine.wait_ready(timeout_s=timeout_s)
        except WorkerKilled:
            await self.end_engine(engine)
            engines.actors[index] = await self._spawn_engine(index, ends_groups=engine.groups)
            raise

    async def restart_engine(self, dead: EngineActors, engines: Engines) -> EngineAddress:
        """Start a new engine in the place of `dead`, which `end_engine` was called for; end what
        remains of that first. Raises WorkerDied or WaitTimeout if it does not start."""
        timeout_s = self.recipe.machine.start_timeout_s
        new = await self._spawn_engine(dead.index, ends_groups=dead.groups)
        engines.actors[dead.index] = new
        await new.start(timeout_s=timeout_s)
        await new.wait_ready(timeout_s=timeout_s)
        return self._address(new.specs[0], dead.index)

    def slot_fleets(self, engines: Engines) -> list[SglangFleet]:
        """Return a client of the same engines for each of `adapters` by name, in order."""
        served = self.engine_addresses(engines)
        return [self._fleet(served, adapter=name) for name in self.recipe.adapters]

    def base_fleet(self, engines: Engines) -> SglangFleet:
        """Return a client of the engines that uses the model without any adapter."""
        return self._fleet(self.engine_addresses(engines), serves_policy=False)

    def _fleet(
        self,
        engines: list[EngineAddress],
        *,
        serves_policy: bool = True,
        adapter: str | None = None,
    ) -> SglangFleet:
        """Return the client of a fleet's engines. `adapter`: its adapter, if there are several."""
        return SglangFleet(
            engines=engines,
            **self._client_arguments(serves_policy=serves_policy, adapter=adapter),
        )

    def _inputs_of(self, adapter: str | None) -> RunInputs:
        """Return the inputs of one of several adapters, which may have a chat template of its own;
        None: the run's."""
        return self.spec.adapters.get(adapter or "", self.spec).inputs

    def _client_arguments(
        self, *, serves_policy: bool = True, adapter: str | None = None
    ) -> dict[str, Any]:
        """Return the arguments of a client, except its engines."""
        inputs = self._inputs_of(adapter)
        bound_s = self.recipe.machine.request_timeout_s
        facts = inputs.facts
        serves_adapter = serves_policy and start_folder(self.spec) is not None
        replay = self.recipe.train.routing_replay
        return {
            "response_timeout_s": bound_s,
            "order_timeout_s": min(bound_s, ORDER_TIMEOUT_S),
            "routing_shape": (facts.num_layers, facts.topk) if replay else None,
            "adapter": adapter or (SOLE_ADAPTER if serves_adapter else None),
            "shares_engines": adapter is not None,
            "on_update": self.recipe.rollout.on_update,
            "stop_ids": inputs.own_stop_ids if serves_policy else (),
            # several adapters' clients share each engine, and none knows what the others ask
            "max_running": None if adapter else self.plan.engines.max_running_requests,
        }

    async def start_collector(
        self,
        number: int,
        engines: Sequence[EngineAddress],
        *,
        recipe: Recipe,
        adapter: str | None,
        fleet: SglangFleet,
        policies: Mapping[str, SglangFleet],
        journal: SampleJournal | None,
        with_greedy: bool,
    ) -> ActorHandle:
        """Start a process that collects from these engines of the fleet, by this recipe, an
        adapter's if there are several. `policies`: clients of those that play a role."""
        all_nodes, adapters = sorted({slot.node for slot in self.plan.slots}), [*self.spec.adapters]
        count = self.plan.collectors // max(1, len(adapters))
        place = number + (count * adapters.index(adapter) if adapter else 0)
        nodes, part = collector_nodes(recipe, self.plan.collectors, all_nodes), None
        name = collector_name(number, adapter)
        if journal is not None:
            part = JournalPart(
                folder=journal.part(part_of(number)),
                identity=journal.identity,
                bound_bytes=journal.bound_bytes / (1 + count),
            )
        collector = await self.cluster.spawn(
            name,
            COLLECTOR_TARGET,
            node=nodes[place],
            num_cpus=0.0,
            kwargs={
                "name": name,
                "recipe": recipe,
                "share": share_of(place, nodes=nodes, all_nodes=all_nodes, count=count),
                "origin": Origin.here(),
                "cluster": self.cluster,
                "tokenizer": self._inputs_of(adapter).tokenizer,
                "vocab_size": self.spec.inputs.facts.vocab_size,
                "fleet": {
                    "engines": list(engines),
                    **self._client_arguments(adapter=adapter),
                },
                "policies": {
                    name: {
                        "engines": list(served.engines),
                        **self._client_arguments(serves_policy=False),
                    }
                    for name, served in policies.items()
                },
                "version": fleet.version,
                "is_paused": fleet.is_paused,
                "with_greedy": with_greedy,
                "journal": part,
            },
            environment={},
        )
        try:
            await collector.start(
                timeout_s=self.recipe.machine.start_timeout_s, secrets=secrets_of(os.environ)
            )
        except BaseException:
            await self.cluster.kill([collector])
            raise
        return collector

    async def _start_scorer(self, engines: Engines) -> None:
        engines.scorer = await self.start_scorer()

    async def start_scorer(self) -> RankGroup:
        """Start the process of the recipe's reward model, on the first device, which it shares with
        other processes. Return it."""
        folder, settings = self.spec.inputs.reward_model_dir, self.recipe.machine
        port = (await self.resources.free_ports(1, node=0))[0]
        first = [slot for slot in self.plan.slots if slot.node == 0][:1]
        scorer = await self.cluster.spawn(
            SCORER_NAME,
            SCORER_TARGET,
            node=0,
            num_cpus=0.0,
            kwargs={
                "recipe": self.recipe,
                "plan": self.plan,
                "model_dir": str(folder),
                "master_addr": self.resources.host(0),
                "master_port": port,
            },
            environment=trainer_environment(
                self.plan, self.resources.devices(first), self.resources.interfaces(0)
            ),
        )
        return RankGroup(
            cluster=self.cluster,
            ranks=[scorer],
            pids=await self._set_up([scorer]),
            layout=TrainerLayout(),
            step_timeout_s=settings.request_timeout_s,
        )

    async def _spawn_engine(self, index: int, *, ends_groups: Sequence[int] = ()) -> EngineActors:
        """Spawn one actor on each node of the engine; the first one runs its HTTP server.
        `ends_groups`: [nodes] process groups to kill there first."""
        nodes = sorted({slot.node for slot in self.plan.slots if slot.engine == index})
        head, specs, handles = nodes[0], list[EngineSpec](), list[ActorHandle]()
        ports = await self.resources.free_ports(2 if len(nodes) > 1 else 1, node=head)
        meeting = f"{self.resources.host(head)}:{ports[1]}" if len(nodes) > 1 else None
        for rank, node in enumerate(nodes):
            port = ports[0] if node == head else (await self.resources.free_ports(1, node=node))[0]
            spec = replace(
                _engine_spec(self.spec, index, port, log_dir=self.log_dir),
                name=f"engine {index}" if node == head else f"engine {index} on node {rank}",
                log_path=self.log_dir
                / f"engine-{index}{'' if node == head else f'-node-{rank}'}-server.log",
                host=self.resources.host(node),
                api_key=self.resources.api_key,
                num_nodes=len(nodes),
                node_rank=rank,
                init_address=meeting,
                visible_devices=self.resources.devices(self._engine_slots(index, node)),
                warm=self.warm,
                ends_group=ends_groups[rank] if ends_groups else 0,
            )
            specs.append(spec)
            handles.append(
                await self.cluster.spawn(
                    spec.name,
                    ENGINE_TARGET,
                    node=node,
                    num_gpus=self._gpu_share(),
                    kwargs={"spec": spec},
                    environment=engine_environment(
                        self.plan, spec.visible_devices, self.resources.interfaces(node)
                    ),
                )
            )
        return EngineActors(index=index, specs=specs, handles=handles)

    def _engine_slots(self, engine: int, node: int) -> list[Slot]:
        slots = [slot for slot in self.plan.slots if slot.engine == engine and slot.node == node]
        return sorted(slots, key=lambda slot: slot.engine_rank or 0)

    def _gpu_share(self) -> float:
        """Return the GPUs that Ray counts for each process on a device; miles itself chooses the
        devices. Two halves make a device if trainer and engine share one."""
        if self.plan.device_kind == "cpu":
            return 0.0
        return 0.5 if self.plan.colocated else 1.0

    def engine_addresses(self, engines: Engines, fleet: str = ROLLOUT) -> list[EngineAddress]:
        """Return the addresses by which a fleet's client and the trainer ranks reach its engines.
        `fleet`: may be one of `rollout.policies`."""
        indices = self.indices_of(fleet)
        return [self._address(engines.actors[index].specs[0], index) for index in indices]

    def indices_of(self, fleet: str) -> range:
        """Return the indices of a fleet's engines in the plan: those of rollout come first, then
        those for evaluations, then one for each of `rollout.policies`."""
        num, policies = self.plan.engines.num, self.recipe.rollout.policies
        num_rollout = num - self.plan.engines_apart
        of_policies = num - min(len(policies), self.plan.engines_apart)
        if fleet in policies:
            first = of_policies + policies.index(fleet)
            return range(first, first + 1)
        return range(num_rollout) if fleet == ROLLOUT else range(num_rollout, of_policies)

    def _address(self, spec: EngineSpec, index: int) -> EngineAddress:
        on_cpu = self.plan.device_kind == "cpu"
        return EngineAddress(
            url=spec.url,
            name=spec.name,
            tp=spec.tp,
            sharing_ranks=sharing_ranks(self.plan.slots, index, on_cpu=on_cpu),
            api_key=spec.api_key,
            log_path=spec.log_path,
            has_own_draft=spec.speculation is not None and spec.speculation.has_own_weights,
        )


def _engine_spec(spec: RunSpec, index: int, port: int, *, log_dir: Path) -> EngineSpec:
    """Return the part of the spec that is equal on all nodes of an engine. An engine that plays a
    role has neither adapter nor speculation: both belong to the policy."""
    plays_role = index >= spec.plan.engines.num - len(spec.inputs.policy_dirs)
    made = engine_spec(
        spec.recipe,
        spec.plan,
        index=index,
        port=port,
        model_dir=(None if plays_role else engine_folder(spec))
        or spec.inputs.model_dir_of(index, num_engines=spec.plan.engines.num),
        log_dir=log_dir,
        has_stop=any(recipe.rollout.may_send_stop for recipe in spec.sampled_by),
        draft_dir=spec.inputs.draft_dir,
        adapter_dir=None if plays_role else start_folder(spec),
    )
    if plays_role:
        return replace(made, speculation=None, exact=False, input_format=None)
    return made


def check_engines(spec: RunSpec) -> None:
    """Raise MilesError if an engine cannot serve this model, or cannot be started as the recipe
    says. Called before any engine starts."""
    engine = _engine_spec(spec, 0, 0, log_dir=Path())
    check_servable(engine)
    check_speculates(engine)
    check_extra(engine)


def spawn_ranks_ahead(cluster: Cluster, plan: Plan) -> None:
    """Start the processes of the trainer's ranks on this computer's CPU, so that they import their
    modules before `start_trainer` builds them."""
    asyncio.run(cluster.place(plan, timeout_s=PLACE_TIMEOUT_S))
    for rank in sorted(slot.trainer_rank for slot in plan.slots if slot.trainer_rank is not None):
        cluster.spawn_ahead(rank_name(rank), TRAINER_TARGET, environment=trainer_environment(plan))


def trainer_slots(plan: Plan) -> list[Slot]:
    """Return the trainer's slots in the order of their ranks."""
    slots = [slot for slot in plan.slots if slot.trainer_rank is not None]
    return sorted(slots, key=lambda slot: slot.trainer_rank or 0)


def rank_name(rank: int) -> str:
    """Return a rank's name for people."""
    return f"trainer rank {rank}"


FOLDER = "adapter_start"
"""Folder of the initial adapter in the run directory."""


def start_folder(spec: RunSpec) -> Path | None:
    """Return the folder of the engines' initial adapter; None if nothing is trained, or engines
    receive whole models."""
    trains = any(slot.trainer_rank is not None for slot in spec.plan.slots)
    serves = spec.recipe.train.lora.is_on and not spec.plan.merges_adapter
    return spec.run.path / FOLDER if trains and serves else None


def write_start(spec: RunSpec) -> None:
    """Write the engines' initial adapter as a PEFT folder, once. It has the shape of the trained
    one and is zero, so that it changes nothing before the first publish. Does nothing if there is
    no such adapter."""
    folder, shape = start_folder(spec), trained_shape(spec.recipe)
    if folder is None or shape is None or is_adapter(folder):
        return
    from milescli.export.adapter import adapter_of, write_adapter  # with torch, for adapters alone

    of_adapter = adapter_table(table(spec.inputs.facts), shape)
    zeros = {name: torch.zeros(size) for name, size in of_adapter.hf_shapes().items()}
    base_model = spec.inputs.model_dir
    write_adapter(folder, adapter_of(zeros, of_adapter, shape, base_model=base_model))


def sharing_ranks(slots: Sequence[Slot], engine: int, *, on_cpu: bool) -> list[int]:
    """Return [tp] the trainer rank for each rank of the engine: the one on its own device; on a CPU
    the first one on its node, so that each node holds one copy of a bucket. The list is empty if an
    engine rank has none: its weights must come through a group."""
    shards = sorted(
        (slot for slot in slots if slot.engine == engine), key=lambda slot: slot.engine_rank or 0
    )
    if on_cpu:
        first: dict[int, int] = {}
        for slot in slots:
            if slot.trainer_rank is not None:
                first[slot.node] = min(slot.trainer_rank, first.get(slot.node, slot.trainer_rank))
        owners = [first.get(shard.node) for shard in shards]
    else:
        owners = [shard.trainer_rank for shard in shards]
    ranks = [rank for rank in owners if rank is not None]
    return ranks if len(ranks) == len(shards) else []
