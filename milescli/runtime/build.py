"""The composition root: from a spec to running actors, each of its vendor."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field, replace
from pathlib import Path

from milescli.backends.ray.cluster import ActorHandle, Cluster
from milescli.backends.ray.group import run_all, start_all
from milescli.backends.sglang.arguments import check_extra
from milescli.backends.sglang.client import ORDER_TIMEOUT_S, SglangFleet
from milescli.backends.sglang.ports import free_ports
from milescli.backends.sglang.router import RouterServer, RouterSpec
from milescli.backends.sglang.server import EngineSpec, check_servable
from milescli.cluster.resources import NodeResources
from milescli.core.errors import WaitTimeout, WorkerDied
from milescli.core.log_tail import last_log_lines
from milescli.core.types import EVALUATION, ROLLOUT, EngineAddress
from milescli.plan.types import Plan, Slot, TrainerLayout
from milescli.platform.environment import engine_environment, trainer_environment
from milescli.recipe.schema import Recipe
from milescli.runtime.engine_spec import engine_spec
from milescli.runtime.score_client import ScoreClient
from milescli.runtime.spec import RunSpec
from milescli.runtime.supervise import Probe
from milescli.runtime.trainer import RankGroup
from milescli.weights.channels import CHANNELS
from milescli.weights.sharing import sharing_ranks

TRAINER_TARGET = "milescli.backends.megatron.worker:TrainerRank"
SCORER_TARGET = "milescli.backends.megatron.score_rank:ScoreRank"
SCORER_NAME = "reward model"
ENGINE_TARGET = "milescli.backends.sglang.server:EngineServer"
PLACE_TIMEOUT_S = 60.0
"""For a session of our own on this computer to reserve what the plan needs."""


@dataclass(slots=True, kw_only=True)
class Engines:
    """The rollout side: actors that hold engine processes, the router before them, and the
    client."""

    handles: list[ActorHandle] = field(default_factory=list)
    specs: list[EngineSpec] = field(default_factory=list)
    router: RouterServer | None = None
    fleet: SglangFleet | None = None
    evaluation: SglangFleet | None = None
    """Of the engines that are kept for evaluations; None: the plan keeps none."""
    policies: dict[str, SglangFleet] = field(default_factory=dict)
    """Of the engines that serve `rollout.policies`, by their name there."""
    scorer: ActorHandle | None = None
    """Holds the reward model, where the recipe asks one."""
    scores: ScoreClient | None = None

    @property
    def heads(self) -> list[EngineSpec]:
        """Of each engine the part that answers requests."""
        return [spec for spec in self.specs if spec.node_rank == 0]

    async def stop(self) -> None:
        """End client, router and engines; what does not end in time is left to the watchdog."""
        for fleet in filter(None, (self.fleet, self.evaluation, *self.policies.values())):
            await fleet.close()
        if self.router is not None:
            await asyncio.to_thread(self.router.stop)
        with contextlib.suppress(
            Exception
        ):  # a dead engine cannot be stopped; the watchdog looks after the rest
            await run_all(self.handles, "stop", timeout_s=20.0)

    @property
    def probes(self) -> list[Probe]:
        """What looks whether they live."""
        engines = [engine_probe(h, s) for h, s in zip(self.handles, self.specs, strict=True)]
        return [*engines, *([rank_probe(self.scorer)] if self.scorer else [])]


@dataclass(slots=True, kw_only=True)
class Builder:
    """Starts the processes of one run. `resources` is taken already."""

    spec: RunSpec
    cluster: Cluster
    resources: NodeResources
    log_dir: Path
    warm: Path | None = None
    """Where engines are asked for, if a warm process waits; see `prestart`."""

    @property
    def recipe(self) -> Recipe:
        """The spec's."""
        return self.spec.recipe

    @property
    def plan(self) -> Plan:
        """The spec's."""
        return self.spec.plan

    async def start_trainer(self, *, with_teachers: bool) -> RankGroup:
        """All trainer ranks, with the model loaded, and those of the run's teachers, where it has
        any. They meet on the node of rank 0."""
        settings, resources, ranks = self.recipe.machine, self.resources, []
        slots = sorted(
            (slot for slot in self.plan.slots if slot.trainer_rank is not None),
            key=lambda slot: slot.trainer_rank or 0,
        )
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
                "teacher_dirs": [
                    str(folder) for folder in self.spec.inputs.teacher_dirs if with_teachers
                ],
                "channel": CHANNELS.path_of(self.plan.channel, key="weights.channel")
                if self.plan.engines.num
                else None,
            }
            ranks.append(
                await self.cluster.spawn(
                    rank_name(slot.trainer_rank or 0),
                    TRAINER_TARGET,
                    node=slot.node,
                    num_gpus=self._gpu_share(),
                    kwargs=arguments,
                    environment=trainer_environment(
                        self.plan, resources.devices([slot]), resources.interfaces(slot.node)
                    ),
                )
            )
        await start_all(ranks, timeout_s=settings.start_timeout_s)
        await run_all(ranks, "setup", timeout_s=settings.start_timeout_s)
        return RankGroup(
            cluster=self.cluster,
            ranks=ranks,
            layout=self.plan.trainer,
            step_timeout_s=settings.step_timeout_s,
            async_save=self.recipe.checkpoint.async_save,
        )

    async def start_engines(self, engines: Engines) -> SglangFleet:
        """All engines at once, then the router if there is one, and the client. `engines` is filled
        as processes start, so that a failure half-way can still stop them."""
        timeout_s = self.recipe.machine.start_timeout_s
        for index in range(self.plan.engines.num):
            await self._spawn_engine(index, engines)
        await start_all(engines.handles, timeout_s=timeout_s)
        await run_all(engines.handles, "start", timeout_s=timeout_s)
        await self._start_scorer(engines)
        await run_all(engines.handles, "wait_ready", timeout_s, timeout_s=timeout_s + 10)
        of_rollout = self.engine_addresses(engines)
        engines.fleet = self._fleet(of_rollout, await self._start_router(of_rollout, engines))
        if of_evaluation := self.engine_addresses(engines, EVALUATION):
            engines.evaluation = self._fleet(of_evaluation, None)
        for name in self.recipe.rollout.policies:
            engines.policies[name] = self._fleet(self.engine_addresses(engines, name), None)
        return engines.fleet

    def _fleet(self, engines: list[EngineAddress], router_url: str | None) -> SglangFleet:
        facts, bound_s = self.spec.inputs.facts, self.recipe.machine.request_timeout_s
        replay = self.recipe.train.routing_replay
        return SglangFleet(
            router_url=router_url,
            engines=engines,
            response_timeout_s=bound_s,
            order_timeout_s=min(bound_s, ORDER_TIMEOUT_S),
            routing_shape=(facts.num_layers, facts.topk) if replay else None,
        )

    async def _start_scorer(self, engines: Engines) -> None:
        """The process that holds the reward model, where the recipe asks one: on the first device,
        which it shares with whoever else is there."""
        folder, settings = self.spec.inputs.reward_model_dir, self.recipe.machine
        if folder is None:
            return
        port = (await self.resources.free_ports(1, node=0))[0]
        first = [slot for slot in self.plan.slots if slot.node == 0][:1]
        engines.scorer = await self.cluster.spawn(
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
        await start_all([engines.scorer], timeout_s=settings.start_timeout_s)
        await run_all([engines.scorer], "setup", timeout_s=settings.start_timeout_s)
        ranks = RankGroup(
            cluster=self.cluster,
            ranks=[engines.scorer],
            layout=TrainerLayout(),
            step_timeout_s=settings.request_timeout_s,
            async_save=False,
        )
        engines.scores = ScoreClient(ranks)

    async def _start_router(self, asked: list[EngineAddress], engines: Engines) -> str | None:
        """Its URL. None: a single engine needs none, nor do those that share the cores of one
        computer, for which it costs more than it gains."""
        one_computer = all(slot.node == 0 for slot in self.plan.slots)
        if len(asked) == 1 or (self.plan.device_kind == "cpu" and one_computer):
            return None
        port, metrics_port = await asyncio.to_thread(free_ports, 2)
        engines.router = RouterServer(
            RouterSpec(
                worker_urls=tuple(engine.url for engine in asked),
                port=port,
                metrics_port=metrics_port,
                log_path=self.log_dir / "router.log",
                api_key=self.resources.api_key,
            )
        )
        engines.router.start()
        await asyncio.to_thread(engines.router.wait_ready, 60.0)
        return engines.router.spec.url

    async def _spawn_engine(self, index: int, engines: Engines) -> None:
        """One actor on each node that the engine lies on; the first has its HTTP server."""
        nodes = sorted({slot.node for slot in self.plan.slots if slot.engine == index})
        head = nodes[0]
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
            )
            engines.specs.append(spec)
            engines.handles.append(
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

    def _engine_slots(self, engine: int, node: int) -> list[Slot]:
        slots = [slot for slot in self.plan.slots if slot.engine == engine and slot.node == node]
        return sorted(slots, key=lambda slot: slot.engine_rank or 0)

    def _gpu_share(self) -> float:
        """What Ray counts for each process on a device; which devices those are, we say ourselves.
        Halves add up to a device where trainer and engine share one."""
        if self.plan.device_kind == "cpu":
            return 0.0
        return 0.5 if self.plan.colocated else 1.0

    def engine_addresses(self, engines: Engines, fleet: str = ROLLOUT) -> list[EngineAddress]:
        """How a fleet's client and the trainer ranks reach its engines. `fleet`: may be one of
        `rollout.policies`, whose engines are the last."""
        on_cpu = self.plan.device_kind == "cpu"
        num_rollout = len(engines.heads) - self.plan.engines_apart
        policies = self.recipe.rollout.policies
        num_policies = min(len(policies), self.plan.engines_apart)
        of_policies = len(engines.heads) - num_policies
        addresses = [
            EngineAddress(
                url=spec.url,
                name=spec.name,
                tp=spec.tp,
                sharing_ranks=sharing_ranks(self.plan.slots, index, on_cpu=on_cpu),
                api_key=spec.api_key,
                log_path=spec.log_path,
            )
            for index, spec in enumerate(engines.heads)
        ]
        if fleet in policies:
            return [addresses[of_policies + policies.index(fleet)]]
        return addresses[:num_rollout] if fleet == ROLLOUT else addresses[num_rollout:of_policies]


def _engine_spec(spec: RunSpec, index: int, port: int, *, log_dir: Path) -> EngineSpec:
    """What is equal on all nodes of an engine."""
    return engine_spec(
        spec.recipe,
        spec.plan,
        index=index,
        port=port,
        model_dir=spec.inputs.model_dir_of(index, num_engines=spec.plan.engines.num),
        log_dir=log_dir,
    )


def check_engines(spec: RunSpec) -> None:
    """Raises where an engine cannot serve this model, or cannot be started as the recipe wants;
    called before any is started."""
    engine = _engine_spec(spec, 0, 0, log_dir=Path())
    check_servable(engine)
    check_extra(engine)


def spawn_ranks_ahead(cluster: Cluster, plan: Plan) -> None:
    """Start the processes of the trainer's ranks on this computer's CPU, which import what they
    need until `start_trainer` builds them."""
    asyncio.run(cluster.place(plan, timeout_s=PLACE_TIMEOUT_S))
    for rank in sorted(slot.trainer_rank for slot in plan.slots if slot.trainer_rank is not None):
        cluster.spawn_ahead(rank_name(rank), TRAINER_TARGET, environment=trainer_environment(plan))


def rank_name(rank: int) -> str:
    """As people read it."""
    return f"trainer rank {rank}"


def engine_probe(handle: ActorHandle, spec: EngineSpec):
    """Looks at one engine process through the actor that holds it."""

    async def probe() -> None:
        code = None
        with contextlib.suppress(WaitTimeout):
            code = await handle.peek("poll", timeout_s=60.0)
        if code is not None:
            raise WorkerDied(
                f"{spec.name} died",
                why=f"its process ended {_manner(code)}; last lines of its "
                f"log:\n{last_log_lines(spec.log_path)}",
                fix=f"less {spec.log_path}",
            )

    return probe


def rank_probe(handle: ActorHandle):
    """Looks at one trainer rank; a dead actor answers with its WorkerDied."""

    async def probe() -> None:
        with contextlib.suppress(
            WaitTimeout
        ):  # busy is not dead; a hang is found by the bound of the call that hangs
            await handle.check(timeout_s=60.0)

    return probe


def _manner(code: int) -> str:
    import signal

    return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
