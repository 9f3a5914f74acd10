"""Shows a Plan on the screen and as JSON. In about one screen: what runs, who set what, and what
was decided with its reason; with -v also placement, memory by part, next best layouts, every choice
and every key."""

from __future__ import annotations

import os

from milescli.console.output import Output
from milescli.console.pager import paging
from milescli.console.theme import Segment, staircase
from milescli.core.files import parse_json
from milescli.core.units import GIB, format_bytes, format_count, format_duration
from milescli.plan.types import Forecast, Part, Plan, Slot
from milescli.platform.environment import environment_rows
from milescli.recipe.alerts import describe_alerts
from milescli.recipe.keys import keys
from milescli.recipe.layers import SettingsLayer
from milescli.recipe.load import LoadedRecipe, value_at
from milescli.recipe.section import plain

WIDTH = 40
"""Number of characters of the bar for a device's memory."""


def show_forecast(plan: Plan, forecast: Forecast, *, price: float | None, output: Output) -> None:
    """Show the forecast; in JSON mode nothing, as the plan contains it."""
    for title, parts in (
        ("during training", forecast.training),
        ("during rollout", forecast.rollout),
    ):
        if not parts:
            continue
        output.table(
            ["part", "GiB", "", "known by"],
            _rows(parts, forecast.memory_bytes),
            title=f"memory of the fullest {forecast.device} {title}, of "
            f"{forecast.memory_bytes / GIB:.0f} GiB",
        )
        output.blank()
    output.kv(_times(plan, forecast, price), title="predicted by rooflines, not measured")
    output.blank()
    if forecast.alternatives:
        output.table(
            ["next best trainer", "step", "training", "GiB"],
            [
                (
                    other.layout,
                    format_duration(other.step_s),
                    format_duration(other.train_s),
                    round(other.train_bytes / GIB, 1),
                )
                for other in forecast.alternatives
            ],
        )
        output.blank()
    output.table(["these figures assume"], [(text,) for text in forecast.assumptions])
    output.blank()


def _rows(parts: list[Part], total: int) -> list[tuple[object, ...]]:
    segments = [
        Segment(name=part.name, size=part.size_bytes, is_free=part.name == "margin")
        for part in parts
    ]
    lines = staircase(segments, total=total, width=WIDTH)
    return [
        (part.name, round(part.size_bytes / GIB, 1), line, part.basis)
        for part, line in zip(parts, lines, strict=True)
    ]


def _times(plan: Plan, forecast: Forecast, price: float | None) -> dict[str, object]:
    parts = ", ".join(
        f"{name} {seconds:.1f}"
        for name, seconds in forecast.train_parts_s.items()
        if seconds >= 0.05
    )
    rollout = {
        "rollout": f"{format_duration(forecast.rollout_s)}; an engine holds "
        f"{format_count(forecast.cache_tokens)} tokens"
    }
    sync = {
        "sync": format_duration(forecast.sync_s)
        + (", with sleep and wake-up" if plan.colocated else "")
    }
    rows = {
        **(rollout if plan.engines.num else {}),
        "train": format_duration(forecast.train_s) + (f" ({parts})" if parts else ""),
        **(sync if plan.engines.num else {}),
        "step": f"{format_duration(forecast.step_s)}, {format_count(forecast.tokens_per_s)} "
        "tokens/s",
        "run": f"{plan.steps} steps: {format_duration(forecast.step_s * plan.steps)}, "
        f"{forecast.gpu_hours:,.1f} GPU-hours",
        "host": f"{format_bytes(forecast.host_bytes)} of "
        f"{format_bytes(forecast.host_memory_bytes)} main memory of a node",
    }
    if forecast.publishing_bytes:
        rows["publishing"] = (
            f"{format_bytes(forecast.publishing_bytes)} while trainer and engine both hold weights"
        )
    if price is not None:
        rows["cost"] = f"{cost(forecast, price):,.0f} at {price:g} a GPU-hour"
    return rows


def cost(forecast: Forecast, price: float) -> float:
    """Return the cost to the end of the recipe, in the unit of the price."""
    return round(forecast.gpu_hours * price, 2)


SMALL = 8
"""Largest number of slots that are shown in a line each."""
ENVIRONMENT = (
    "MILES_",
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "NCCL_",
    "GLOO_",
)
"""Variables that change what runs; shown by -v."""


def show_plan(
    plan: Plan,
    loaded: LoadedRecipe,
    *,
    output: Output,
    with_origins: bool,
    price_per_gpu_hour: float | None = None,
) -> None:
    """Show everything that would run, and why."""
    payload: dict[str, object] = {
        "plan": parse_json(plan.to_json()),
        "fingerprint": plan.fingerprint,
    }
    if price_per_gpu_hour is not None and plan.forecast is not None:
        payload["cost"] = cost(plan.forecast, price_per_gpu_hour)
    if alerts := describe_alerts(loaded.recipe.run):
        payload["alerts"] = alerts
    if with_origins:
        payload["recipe"] = {
            name: {"value": plain(value_at(loaded.recipe, name)), "origin": str(by)}
            for name, by in loaded.origins.items()
        }
        payload["environment"] = _environment()
        payload["actor_environment"] = [
            {"for": whom, "variable": name, "value": value, "reason": reason}
            for whom, name, value, reason in environment_rows(plan)
        ]
    output.json("plan", payload)
    with paging(output):
        _show(plan, loaded, alerts, output=output, is_all=with_origins, price=price_per_gpu_hour)
    if (epochs := loaded.recipe.train.epochs) is not None:
        output.note(
            f"`train.epochs` is {epochs:g}, and the plan reads no rows: its steps, GPU-hours and "
            f"cost are of {plan.steps} steps"
        )
    rest = "" if with_origins else "; -v shows the rest: placement, memory, every choice and key"
    output.note(f"nothing was started{rest}")


def _show(
    plan: Plan,
    loaded: LoadedRecipe,
    alerts: str,
    *,
    output: Output,
    is_all: bool,
    price: float | None,
) -> None:
    layout = {**_layout(plan), **({"alerts": alerts} if alerts else {})}
    title = f"plan {plan.fingerprint} for {loaded.recipe.name}"
    if is_all:
        output.kv(layout, title=title)
        output.blank()
        _show_all(plan, loaded, output=output, price=price)
        return
    if not plan.engine_format:
        layout.pop("weights", None)
    output.kv({**layout, **_figures(plan, price)}, title=title)
    output.blank()
    _show_set(loaded, output)
    _show_decided(plan, output)


def _figures(plan: Plan, price: float | None) -> dict[str, object]:
    """Return label -> text for one step and what it needs."""
    batch = _batch(plan)
    sizes = [str(batch[key]) for key in list(batch)[:2]]
    rows: dict[str, object] = {"one step": f"{', '.join(sizes)} tokens"}
    if (forecast := plan.forecast) is None:
        return rows
    for title, parts in (("training", forecast.training), ("rollout", forecast.rollout)):
        if parts:
            rows[f"{title} memory"] = _memory_line(parts, forecast.memory_bytes)
    times = _times(plan, forecast, price)
    phases = ", ".join(
        f"{name} {str(times[name]).partition(';')[0].partition(' (')[0].partition(',')[0]}"
        for name in ("rollout", "train", "sync")
        if name in times
    )
    rows["predicted"] = f"a step {times['step']} ({phases}); {times['run']}; not measured"
    rows["host"] = times["host"]
    return {**rows, **{name: times[name] for name in ("cost",) if name in times}}


def _memory_line(parts: list[Part], total: int) -> str:
    """Format memory as `126.6 of 140 GiB: optimizer 48.4, ...`; parts below a thousandth of the
    total are not named."""
    taken = [part for part in parts if part.name != "margin"]
    shown = [part for part in taken if part.size_bytes > total / 1000]
    shown.sort(key=lambda part: -part.size_bytes)
    words = ", ".join(f"{part.name.replace(',', '')} {part.size_bytes / GIB:.1f}" for part in shown)
    all_bytes = sum(part.size_bytes for part in taken)
    return f"{all_bytes / GIB:.1f} of {total / GIB:.0f} GiB: {words}"


def _show_set(loaded: LoadedRecipe, output: Output) -> None:
    """Show what differs from the defaults: each of the user's own settings, and the recipe's
    settings by section."""
    own, others = list[tuple[object, ...]](), dict[tuple[str, str], list[str]]()
    for name, origin in loaded.origins.items():
        value = value_at(loaded.recipe, name)
        if origin.layer in _OWN:
            own.append((name, _short(_value(value)), str(origin)))
        elif origin.layer is not SettingsLayer.DEFAULT and _is_informative(name, value):
            section, _, key = name.partition(".")
            by = str(origin).rpartition(":")[0] or str(origin)
            others.setdefault((by, section), []).append(f"{key} {_short(_value(value))}")
    if own:
        output.table(["you set", "value", "by"], own)
        output.blank()
    for by in dict.fromkeys(by for by, _ in others):
        rows = {
            section: ", ".join(settings)
            for (whose, section), settings in others.items()
            if whose == by
        }
        output.kv(rows, title=f"set by {by}")
        output.blank()


def _is_informative(name: str, value: object) -> bool:
    """Return False for a value that the recipe repeats although it is the default."""
    return name not in _UNSHOWN and (name not in keys() or value != keys()[name].default)


def _show_decided(plan: Plan, output: Output) -> None:
    """Show the decisions that a reader may want to change."""
    rows = [
        (choice.key, choice.value, choice.reason.rstrip(":"))
        for choice in plan.decisions
        if choice.key not in _DERIVED
        and not choice.key.endswith(_EXCEPTION)
        and choice.value not in _NOTHING
        and not choice.reason.startswith("pinned by")
    ]
    if rows:
        output.table(["decided", "value", "because"], rows)
        output.blank()


_OWN = (SettingsLayer.SET, SettingsLayer.ENV, SettingsLayer.FILE)
_UNSHOWN = ("name", "description")
_DERIVED = (
    "trainer.dp",
    "batch",
    "cpu_threads",
    "engines.cpu_threads",
    "weights.channel",
    "weights.transfer",
    "object store",
    "engines.max_total_tokens",
    "engines.max_running_requests",
    "engines.memory_fraction",
    "old_logprobs",
    "experts",
)
"""Decisions that follow from others, or that nobody changes; shown only by -v."""
_EXCEPTION = ".plain"
"""End of the key for a weight that stays plain in a number format."""
_NOTHING = ("1", "none", "false", "False")
"""Values of a decision that mean that nothing is done."""
_LONGEST = 60


def _value(value: object) -> str:
    shown = plain(value)
    if shown is None:
        return "null"
    return str(shown).lower() if isinstance(shown, bool) else str(shown)


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def _show_all(plan: Plan, loaded: LoadedRecipe, *, output: Output, price: float | None) -> None:
    output.kv(_batch(plan), title="one step")
    output.blank()
    if len(plan.slots) <= SMALL:
        rows = [_slot_row(slot) for slot in plan.slots]
        output.table(["node", "device", "trainer rank", "engine"], rows, title="placement")
    else:
        output.table(
            ["nodes", "devices", "trainer ranks", "pipeline stages", "engines"],
            _node_rows(plan),
            title="placement",
        )
    output.blank()
    if plan.forecast is not None:
        show_forecast(plan, plan.forecast, price=price, output=output)
    if plan.decisions:
        rows = [(choice.key, choice.value, choice.reason) for choice in plan.decisions]
        output.table(["chosen", "value", "because"], rows, title="decisions")
        output.blank()
    _show_origins(loaded, plan, output)


def _layout(plan: Plan) -> dict[str, object]:
    trainer, engines = plan.trainer, plan.engines
    sizes = " x ".join(f"{axis} {getattr(trainer, axis)}" for axis in ("tp", "pp", "cp", "dp"))
    experts = f", ep {trainer.ep}, etp {trainer.etp}" if trainer.ep * trainer.etp > 1 else ""
    sequence = ", sequence parallel" if trainer.sequence_parallel else ""
    ends = [("first", trainer.first_stage_layers), ("last", trainer.last_stage_layers)]
    sequence += "".join(f", {layers} layers in the {name} stage" for name, layers in ends if layers)
    sequence += (", recompute" * (trainer.recompute == "full")) + (
        ", optimizer on the host" * trainer.offload_optimizer
    )
    rounded = f", {plan.trainer_format} weights" if plan.trainer_format else ""
    cuts = f", ep {engines.ep}" * (engines.ep > 1) + f", attention dp {engines.attention_dp}" * (
        engines.attention_dp > 1
    )
    where = "on the trainer's devices, in turns" if plan.colocated else "on their own devices"
    separate = f"{plan.engines_apart} of them apart from rollout; " * bool(plan.engines_apart)
    threads = ""
    if plan.device_kind == "cpu":
        count = engines.cpu_threads or plan.cpu_threads
        threads = f", {plan.cpu_threads} threads for a trainer rank"
        threads += f", {count} for an engine's" * bool(engines.num)
    rollout = {
        "engines": f"{engines.num} x tp {engines.tp}{cuts}, {where}; {separate}"
        f"{engines.max_running_requests} requests at once, "
        f"context {engines.context_length}",
        "weights": f"channel {plan.channel}"
        + f", held by engines in {plan.engine_format}" * bool(plan.engine_format),
        "staleness": f"at most {plan.max_staleness}",
    }
    return {
        "devices": f"{plan.device_kind}, {plan.precision}, {plan.collective}{threads}",
        "trainer": f"{trainer.world_size} rank{'s' * (trainer.world_size > 1)}: "
        f"{sizes}{experts}{sequence}{rounded}",
        **(rollout if engines.num else {"engines": "none: the run does not sample"}),
        "steps": (f"{plan.warmup_steps} warm-up, " if plan.warmup_steps else "")
        + (f"{plan.steps}" if plan.batch.of_rows else f"{plan.steps} RL"),
    }


def _batch(plan: Plan) -> dict[str, object]:
    batch = plan.batch
    most_tokens = batch.num_samples * batch.max_sequence_tokens
    per_update = batch.num_samples // batch.updates_per_step
    sizes = (
        {
            "samples": f"{batch.prompts_per_step} prompts x {batch.samples_per_prompt} samples = "
            f"{batch.num_samples}"
        }
        if not batch.of_rows
        else {
            "rows": f"{batch.prompts_per_step}"
            + (f" pairs = {batch.num_samples} sequences" * (batch.samples_per_prompt == 2))
        }
    )
    return {
        **sizes,
        "tokens": f"at most {batch.num_samples} x {batch.max_sequence_tokens} = {most_tokens:,}",
        "updates": f"{batch.updates_per_step} x {per_update} sequences, in microbatches of at most "
        f"{batch.max_tokens_per_microbatch:,} tokens a rank",
    }


def _node_rows(plan: Plan) -> list[tuple[object, ...]]:
    """Return one row for each node; similar nodes are not merged, so that every rank can be looked
    up."""
    nodes: dict[int, list[Slot]] = {}
    for slot in plan.slots:
        nodes.setdefault(slot.node, []).append(slot)
    per_stage = plan.trainer.world_size // plan.trainer.pp
    rows = []
    for node, slots in nodes.items():
        ranks = [slot.trainer_rank for slot in slots if slot.trainer_rank is not None]
        engines = [slot.engine for slot in slots if slot.engine is not None]
        rows.append(
            (
                str(node),
                _span([slot.device for slot in slots]),
                _span(ranks) or None,
                _span([rank // per_stage for rank in ranks]) or None,
                _span(engines) or None,
            )
        )
    return rows


def _span(numbers: list[int]) -> str:
    """Format consecutive numbers: [4, 5, 6, 7] -> '4-7'."""
    if not numbers:
        return ""
    return f"{min(numbers)}-{max(numbers)}" if min(numbers) < max(numbers) else str(numbers[0])


def _slot_row(slot: Slot) -> list[object]:
    engine = (
        None
        if slot.engine is None
        else f"{slot.engine}"
        + (f" (rank {slot.engine_rank})" if slot.engine_rank is not None else "")
    )
    rank = None if slot.trainer_rank is None else str(slot.trainer_rank)
    return [str(slot.node), str(slot.device), rank, engine]


def _show_origins(loaded: LoadedRecipe, plan: Plan, output: Output) -> None:
    rows = [
        (name, _value(value_at(loaded.recipe, name)), str(origin))
        for name, origin in loaded.origins.items()
    ]
    output.table(["key", "value", "origin"], rows, title="recipe")
    output.blank()
    output.kv(_environment() or {"(none)": ""}, title="environment of this shell")
    output.blank()
    output.table(
        ["for", "variable", "value", "because"],
        environment_rows(plan),
        title="environment of actors",
    )
    output.blank()


def _environment() -> dict[str, object]:
    return {
        name: value for name, value in sorted(os.environ.items()) if name.startswith(ENVIRONMENT)
    }
