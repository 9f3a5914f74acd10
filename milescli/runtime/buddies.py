"""Where copies of the ranks' state are kept: with a process on the next node of the plan, or beside
the ranks where there is one node alone. Starts those processes; `copies` sends them the bytes."""

from __future__ import annotations

from milescli.backends.ray.actor import ActorHandle
from milescli.backends.ray.group import start_all
from milescli.plan.types import Plan, TrainerLayout
from milescli.runtime.build import Builder, trainer_slots
from milescli.runtime.trainer import RankGroup

KEEPER_TARGET = "milescli.runtime.copy_keeper:CopyKeeper"


def buddies(plan: Plan) -> list[int]:
    """[ranks] the keeper of each rank's copies, by its number."""
    nodes = _keeper_nodes(plan)
    return [nodes.index(_after(slot.node, plan)) for slot in trainer_slots(plan)]


async def start_keepers(builder: Builder) -> RankGroup:
    """A process on each node that follows one with ranks."""
    settings, keepers = builder.recipe.machine, list[ActorHandle]()
    for number, node in enumerate(_keeper_nodes(builder.plan)):
        keepers.append(
            await builder.cluster.spawn(
                f"copy keeper {number}",
                KEEPER_TARGET,
                node=node,
                num_cpus=0.0,
                kwargs={},
                environment={},
            )
        )
    return RankGroup(
        cluster=builder.cluster,
        ranks=keepers,
        pids=await start_all(keepers, timeout_s=settings.start_timeout_s),
        layout=TrainerLayout(),
        step_timeout_s=settings.step_timeout_s,
        async_save=False,
    )


def _keeper_nodes(plan: Plan) -> list[int]:
    return sorted({_after(slot.node, plan) for slot in trainer_slots(plan)})


def _after(node: int, plan: Plan) -> int:
    """The next node of the plan; after the last one the first."""
    nodes = sorted({slot.node for slot in plan.slots})
    return nodes[(nodes.index(node) + 1) % len(nodes)]
