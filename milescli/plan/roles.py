"""Lists the models of a run and where each runs, and logs them for the plan's reader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from milescli import models
from milescli.core.units import GIB, format_bytes
from milescli.models.facts import ModelFacts
from milescli.plan.memory import TrainerLoad, memory_model
from milescli.plan.search_space import teacher_passes
from milescli.plan.types import Log, Role, TrainerLayout
from milescli.platform.machine import Machine
from milescli.recipe.schema import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class QueriedModels:
    """Describes the models that a run queries and does not train."""

    teachers: Sequence[ModelFacts] = ()
    """Facts of `train.distill`'s teachers, in order."""
    reward: ModelFacts | None = None


NO_QUERIED_MODELS = QueriedModels()


def roles_of(recipe: Recipe, log: Log) -> list[Role]:
    """Return the roles of a run. Also logs which model computes the old log-probs."""
    stale = recipe.rollout.max_staleness > 0
    if recipe.learns_from_rows:
        return _roles_of_rows(recipe, log)
    log.note(
        "old_logprobs",
        recipe.old_logprobs,
        "pinned by `train.old_logprobs`"
        if recipe.train.old_logprobs != "auto"
        else "stale samples came from older weights, and only the engine knows their log-probs"
        if stale
        else "on-policy: the trainer's own log-probs do not depend on how the engine batched",
    )
    roles = [Role(name="policy", place="trainer")]
    if recipe.keeps_reference:
        roles.append(Role(name="reference", place="trainer"))
        why = (
            "pinned by `train.reference`"
            if recipe.train.reference is not None
            else f"`train.kl_coef` is {recipe.train.kl_coef:g}"
        )
        log.note("reference", "on the trainer's ranks, in turn", why)
    if recipe.has_critic:
        roles.append(Role(name="critic", place="trainer"))
        why = f"`train.credit` is gae; it learns at `train.critic.lr` {recipe.train.critic.lr:g}"
        log.note("critic", "on the trainer's ranks, in turn", why)
    if recipe.train.draft.is_on:
        roles.append(Role(name="draft", place="trainer"))
        why = f"the model that guesses learns what the policy says, at {recipe.train.draft.lr:g}"
        log.note("train.draft.lr", "on the trainer's ranks", why)
    return roles


def teacher_roles(
    recipe: Recipe, policy: ModelFacts, teachers: Sequence[ModelFacts], *, size: int, log: Log
) -> list[Role]:
    """Return the roles of the teachers, and log where each runs. `size`: bytes of a weight."""
    own = models.table(policy)
    for teacher, facts in zip(recipe.local_teachers, teachers, strict=True):
        table = models.table(facts)
        log.note(
            f"teacher {teacher.called}",
            "on the trainer's ranks, in turn",
            f"{format_bytes(table.num_parameters * size)} of weights over the ranks; its pass over "
            f"a token is {teacher_passes([facts], own):.2g} of the policy's",
        )
    served = [teacher for teacher in recipe.teachers if teacher.url is not None]
    for teacher in served:
        log.note(
            f"teacher {teacher.called}",
            "served elsewhere",
            "asked by HTTP, while the policy samples",
        )
    return [
        *(Role(name="teacher", place="trainer") for _ in teachers),
        *(Role(name="teacher", place="elsewhere") for _ in served),
    ]


def _roles_of_rows(recipe: Recipe, log: Log) -> list[Role]:
    roles = [Role(name="policy", place="trainer")]
    if recipe.keeps_reference:
        roles.append(Role(name="reference", place="trainer"))
        why = f"`train.preference.loss` {recipe.train.preference.loss} compares with it"
        log.note("reference", "on the trainer's ranks, in turn", why)
    elif recipe.caches_reference:
        why = "its log-probs of the rows are computed once; `train.preference.reference` is cached"
        log.note("reference", "cached in the run directory", why)
    return roles


def without_reward_model(
    recipe: Recipe, machine: Machine, facts: ModelFacts, *, size: int, on_cpu: bool, log: Log
) -> Machine:
    """Return the machine without the memory that the reward model occupies for the whole run. It is
    subtracted from every device as from the first, since all devices are planned alike. `size`:
    bytes of a weight."""
    load = TrainerLoad(
        size=size,
        row_tokens=recipe.longest_sequence + 1,  # each response alone, and a place behind it
        num_microbatches=1,
        keeps_reference=False,
        critic="none",
        sleeps=False,
        bucket_bytes=0,
    )
    weights, working = memory_model(facts).frozen_memory(TrainerLayout(), load, 0)
    context = 0 if on_cpu else load.efficiency.trainer_context
    taken = weights + working + context
    log.note(
        "reward_model",
        "in a process of its own" + ("" if on_cpu else ", on the first device"),
        f"`rollout.reward` asks it; {taken / GIB:.1f} GiB are kept for it, "
        f"{format_bytes(weights)} of them weights",
    )
    return replace(
        machine,
        nodes=[
            replace(node, memory_bytes=max(0, node.memory_bytes - taken))
            if on_cpu
            else replace(
                node,
                devices=[
                    replace(device, memory_bytes=max(1, device.memory_bytes - taken))
                    for device in node.devices
                ],
            )
            for node in machine.nodes
        ],
    )
