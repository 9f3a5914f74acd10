"""What a plan will need and take, on the screen: memory of one device in both phases, seconds of a
step, GPU-hours and cost, the next best layouts, and which figures are counted, by formula, or
estimates."""

from __future__ import annotations

from milescli.console.output import Output
from milescli.console.theme import Segment, staircase
from milescli.core.units import GIB, format_bytes, format_count, format_duration
from milescli.plan.types import Forecast, Part, Plan

WIDTH = 40
"""Characters that stand for a device's memory."""


def show_forecast(plan: Plan, forecast: Forecast, *, price: float | None, output: Output) -> None:
    """Nothing in JSON mode: the plan holds it all."""
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
    output.kv(
        _times(plan, forecast, price), title="predicted, not measured: estimates by rooflines"
    )
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
    """To the end of the recipe, in the unit of the price."""
    return round(forecast.gpu_hours * price, 2)
