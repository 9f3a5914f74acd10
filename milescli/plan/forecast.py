"""Forecasts the needs of a plan: memory part by part in both phases, seconds and GPU-hours, with
the assumptions behind the figures. Pure; called by `make`."""

from __future__ import annotations

from dataclasses import replace

from milescli.core.units import format_bytes
from milescli.plan import reasons
from milescli.plan.activations import FILL, worst_imbalance
from milescli.plan.devices import LINK_SHARE, Efficiency, spec_of
from milescli.plan.on_devices import TrainerEnginePair, publishing_bytes
from milescli.plan.time import MEAN_SHARE
from milescli.plan.types import Basis, Forecast, Part
from milescli.platform.machine import Machine


def forecast(
    pair: TrainerEnginePair, machine: Machine, *, steps: int, num_devices: int
) -> Forecast:
    """Compute the forecast of a pair of trainer and engines that the search found."""
    space, trainer, engines = pair.space, pair.trainer, pair.engines
    device, known = spec_of(machine)
    step_s = pair.step_s
    parts = ("compute", "bubble", "stages", "tensor", "experts", "data", "optimizer")
    return Forecast(
        device=device.name
        if known
        else f"{machine.nodes[0].devices[0].name} (taken for {device.name})",
        memory_bytes=space.memory_bytes,
        training=_training(pair),
        rollout=_rollout(pair),
        publishing_bytes=publishing_bytes(space, trainer, engines) if space.colocated else 0,
        host_bytes=pair.host_bytes,
        host_memory_bytes=machine.nodes[0].memory_bytes,
        cache_tokens=engines.cache_tokens,
        rollout_s=round(engines.seconds.total, 3),
        train_s=round(trainer.seconds.total, 3),
        sync_s=round(pair.sync_s + pair.switch_s, 3),
        step_s=round(step_s, 3),
        train_parts_s={name: round(getattr(trainer.seconds, name), 3) for name in parts},
        tokens_per_s=round(space.work.tokens / step_s, 1),
        gpu_hours=round(step_s * steps * num_devices / 3600, 2),
        assumptions=_assumptions(pair, source=device.source),
        alternatives=reasons.alternatives(space, trainer, pair.trainers, step_s=step_s),
    )


def _training(pair: TrainerEnginePair) -> list[Part]:
    needs = pair.trainer.needs
    parts = [
        Part(name="weights", size_bytes=needs.weights, basis="counted"),
        Part(name="gradients", size_bytes=needs.gradients, basis="counted"),
        Part(name="optimizer", size_bytes=needs.optimizer, basis="counted"),
        Part(name="activations", size_bytes=needs.activations, basis="formula"),
        Part(name="logits", size_bytes=needs.logits, basis="formula"),
        Part(name="workspace", size_bytes=needs.workspace, basis="estimate"),
    ]
    if pair.space.colocated:
        parts.append(
            Part(
                name="engine, asleep",
                size_bytes=pair.space.efficiency.asleep,
                basis="estimate",
            )
        )
    return [*parts, _margin(pair, parts)]


def _rollout(pair: TrainerEnginePair) -> list[Part]:
    if not pair.space.has_engines:
        return []
    needs = pair.engines.needs
    parts = [
        Part(name="weights", size_bytes=needs.weights, basis="counted"),
        Part(name="KV cache", size_bytes=needs.cache, basis="formula"),
        Part(
            name="graphs",
            size_bytes=needs.graphs,
            basis=_basis(pair.space.efficiency, "engine_graphs"),
        ),
        Part(name="workspace", size_bytes=needs.workspace, basis="estimate"),
    ]
    if pair.space.colocated:
        efficiency = pair.space.efficiency
        parts.append(
            Part(
                name="trainer, asleep",
                size_bytes=efficiency.trainer_context,
                basis=_basis(efficiency, "trainer_context"),
            )
        )
    return [*parts, _margin(pair, parts)]


def _basis(efficiency: Efficiency, name: str) -> Basis:
    return "measured" if name in efficiency.measured else "estimate"


def _margin(pair: TrainerEnginePair, parts: list[Part]) -> Part:
    return Part(
        name="margin",
        size_bytes=pair.space.memory_bytes - sum(part.size_bytes for part in parts),
        basis="formula",
    )


def _assumptions(pair: TrainerEnginePair, *, source: str) -> list[str]:
    space, efficiency = pair.space, pair.space.efficiency

    def share(name: str) -> str:
        return efficiency.format_constant(name, f"{getattr(efficiency, name):.0%}")

    assumptions = [
        f"{'prompts and responses' if space.has_engines else 'rows'} are {MEAN_SHARE:.0%} of the "
        "longest that the recipe allows, on average",
        f"training reaches {share('train_share')} of the data sheet's FLOP/s "
        f"({share('expert_share')} in experts), prefill {share('prefill_share')}, decoding "
        f"{share('decode_share')} of the memory bandwidth, collectives {LINK_SHARE:.0%} of the "
        "link",
        f"data sheet: {source}",
        f"attention computes {FILL:.2f} positions for each real one",
    ]
    if efficiency.source:
        assumptions.append(f"measured: {efficiency.source}")
    if space.facts.num_experts:
        assumptions.append(_imbalance(pair))
    return assumptions


def _imbalance(pair: TrainerEnginePair) -> str:
    """Describe the imbalance between expert ranks: no token is dropped, so the router decides how
    many a rank gets."""
    space, trainer = pair.space, pair.trainer
    planned, worst = (
        space.load.packing.imbalance,
        worst_imbalance(space.facts, trainer.layout),
    )
    sentence = (
        f"the busiest expert rank has memory for {planned:g} times its even share of tokens "
        "(train.expert_imbalance)"
    )
    if worst <= planned:
        return f"{sentence}; it cannot get more than {worst:.1f} times"
    packing = replace(space.load.packing, imbalance=worst)
    load = replace(
        space.load,
        row_tokens=trainer.cap,
        num_microbatches=trainer.layout.pp,
        packing=packing,
    )
    total = space.memory.worst_stage(trainer.layout, load).total
    ends = "still fits" if total <= space.trainer_budget else "does not fit"
    return (
        f"{sentence}; at worst it gets {worst:.1f} times, since no token is dropped: "
        f"{format_bytes(total)} in all, which {ends}"
    )
