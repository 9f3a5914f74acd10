"""Plans engines without a trainer, on all devices or on the CPU, for the evaluation of a model.
Pure, no torch, no I/O; called by the runtime."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from milescli import models
from milescli.core.errors import FitError
from milescli.models.facts import ModelFacts
from milescli.plan.choices import WEIGHT_BYTES, batch_plan, choose_precision
from milescli.plan.main_memory import fit_main_memory
from milescli.plan.on_cpu import (
    KV_SLOTS_PER_REQUEST,
    MIN_CACHE_TOKENS,
    context_length,
    engines_on_cpu,
    longest_tokens,
    why_not_two_engines,
)
from milescli.plan.placement import assign_slots, devices_per_node
from milescli.plan.reasons import why_no_engine
from milescli.plan.roles import without_reward_model
from milescli.plan.search import search_engines
from milescli.plan.search_space import search_space
from milescli.plan.types import EngineLayout, Log, Plan, Slot, TrainerLayout
from milescli.platform.machine import Machine
from milescli.recipe.schema import Recipe


def plan_engines(
    recipe: Recipe, machine: Machine, facts: ModelFacts, *, reward: ModelFacts | None = None
) -> Plan:
    """Plan the engines of a recipe that trains nothing. `reward`: facts of a reward model that runs
    beside them. Raises FitError if no engine layout holds the model, with fixes that were tried."""
    try:
        return _planned(recipe, machine, facts, reward)
    except FitError as error:
        fixes = list(_remedies(recipe, machine, facts, reward))[:_MAX_FIXES]
        raise type(error)(error.what, why=error.why, fix=fixes or [REMOTE_SERVER_FIX]) from None


REMOTE_SERVER_FIX = (
    "miles eval http://HOST:8000/v1   # a server that has room for it, on another computer"
)
_MAX_FIXES = 3
_MIN_TOKENS = 64


def _remedies(
    recipe: Recipe, machine: Machine, facts: ModelFacts, reward: ModelFacts | None
) -> Iterator[str]:
    """Yield options under which the model fits, the smallest change of each kind."""

    def fits(section: str, **changes: object) -> bool:
        part = getattr(recipe, section).model_copy(update=changes)
        try:
            _planned(recipe.model_copy(update={section: part}), machine, facts, reward)
        except FitError:
            return False
        return True

    visible = min((len(node.devices) for node in machine.nodes), default=0)
    if recipe.machine.gpus and recipe.machine.gpus < visible and fits("machine", gpus=visible):
        yield f"--set machine.gpus={visible}"
    for requests in (32, 8, 1):
        if fits("engines", max_running_requests=requests):
            yield f"--set engines.max_running_requests={requests}   # fewer at once, slower"
            break
    for tokens in (recipe.rollout.max_response_tokens // part for part in (2, 4, 8)):
        if tokens >= _MIN_TOKENS and fits("rollout", max_response_tokens=tokens):
            yield f"--set rollout.max_response_tokens={tokens}   # shorter responses"
            break
    if recipe.train.precision != "bf16" and fits("train", precision="bf16"):
        yield "--set train.precision=bf16   # half the weights"


def _planned(
    recipe: Recipe, machine: Machine, facts: ModelFacts, reward: ModelFacts | None
) -> Plan:
    log = Log()
    evaluation = recipe.eval.model_copy(update={"engines": "shared"})
    recipe = evaluation_recipe(recipe).model_copy(update={"eval": evaluation})
    per_node = devices_per_node(recipe, machine, log)
    precision = choose_precision(recipe, machine, log)
    size = WEIGHT_BYTES[precision]
    if reward is not None:
        machine = without_reward_model(
            recipe, machine, reward, size=size, on_cpu=per_node == 0, log=log
        )
    if per_node:
        engines = _on_devices(recipe, machine, facts, per_node=per_node, size=size)
        slots = _slots(engines, per_node, recipe)
    else:
        engines, slots = _on_cpu(recipe, machine, facts, size=size, log=log)
    here = sum(slot.node == 0 for slot in slots)
    threads = recipe.machine.cpu_threads or max(1, machine.nodes[0].cpu_cores // here)
    return Plan(
        device_kind=machine.kind if per_node else "cpu",
        collective="nccl" if per_node else "gloo",
        precision=precision,
        trainer=TrainerLayout(),
        engines=engines,
        colocated=False,
        channel="tensor",
        slots=slots,
        batch=batch_plan(
            recipe, facts, TrainerLayout(), longest_tokens(recipe), on_cpu=False, log=log
        ),
        cpu_threads=threads,
        max_staleness=0,
        steps=0,
        warmup_steps=0,
        engines_apart=recipe.engines_apart,
        roles=[],
        decisions=log.decisions,
    )


def evaluation_recipe(recipe: Recipe) -> Recipe:
    """Return the recipe by which engines are sized for an evaluation: its rollout settings are
    those of the evaluation's samples. Its step has as many samples as before, or the number of
    answers of the evaluation if that is known to be smaller."""
    num_prompts, num_each = recipe.eval.num_prompts, recipe.eval.samples_per_prompt
    rollout = recipe.rollout
    changes = {
        "max_response_tokens": recipe.eval.max_response_tokens or rollout.max_response_tokens
    }
    samples = rollout.prompts_per_step * rollout.samples_per_prompt
    if num_prompts is not None and num_prompts * num_each < samples:
        changes |= {"prompts_per_step": num_prompts, "samples_per_prompt": num_each}
    return recipe.model_copy(update={"rollout": rollout.model_copy(update=changes)})


def with_smaller_caches(plan: Plan, *, answers: int, longest: int) -> Plan:
    """Return the plan with caches no larger than needed for `answers` answers, divided among its
    engines. `longest`: most tokens of a prompt and its answer."""
    layout = plan.engines
    if layout.max_total_tokens is None:
        return plan
    at_once = min(layout.max_running_requests, -(-answers // max(1, layout.num)))
    most = max(
        MIN_CACHE_TOKENS, layout.context_length, int(at_once * longest * KV_SLOTS_PER_REQUEST)
    )
    layout = replace(layout, max_total_tokens=min(layout.max_total_tokens, most))
    return replace(plan, engines=layout)


def _slots(engines: EngineLayout, per_node: int, recipe: Recipe) -> list[Slot]:
    shared = assign_slots(TrainerLayout(), engines, True, per_node, recipe.machine.nodes)
    return [replace(slot, trainer_rank=None) for slot in shared]


def _on_cpu(
    recipe: Recipe, machine: Machine, facts: ModelFacts, *, size: int, log: Log
) -> tuple[EngineLayout, list[Slot]]:
    why_one = why_not_two_engines(recipe, machine, facts, size=size, colocated=True)
    engines = engines_on_cpu(recipe, facts, log, why_one=why_one)
    slots = _slots(engines, 0, recipe)
    fitted = fit_main_memory(
        recipe,
        machine,
        facts,
        trainer=TrainerLayout(),
        engines=engines,
        slots=slots,
        size=size,
        log=log,
    )
    return fitted.engines, slots


def _on_devices(
    recipe: Recipe, machine: Machine, facts: ModelFacts, *, per_node: int, size: int
) -> EngineLayout:
    table, num_devices = models.table(facts), per_node * recipe.machine.nodes
    space = search_space(
        recipe, machine, table, devices_per_node=per_node, colocated=False, size=size
    )
    for across in (False, True):
        if fleets := search_engines(space, num_devices, across=across):
            return replace(fleets[0].layout, context_length=context_length(recipe, facts))
    raise FitError(
        f"no engine with {num_devices} x {machine.nodes[0].devices[0].name} can hold the model",
        why=why_no_engine(space, num_devices),
        fix=[],
    )
