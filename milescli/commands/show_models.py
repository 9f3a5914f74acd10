"""Families and models on the screen and as JSON."""

from __future__ import annotations

from dataclasses import asdict

from milescli.console.output import Output
from milescli.core.units import format_bytes, format_count
from milescli.listings.models import FamilyRow, ModelNumbers


def show_families(rows: list[FamilyRow], *, output: Output) -> None:
    """One line a family."""
    output.json("models", {"families": [asdict(row) for row in rows]})
    columns = ["family", "stands for", "convert", "train", "logits", "serve on CPU"]
    output.table(columns, [_row(row) for row in rows])
    output.blank()
    output.note(
        "convert: both ways, bit for bit. train: Megatron-Core computes it here; logits: its "
        "largest difference to transformers',\n"
        "relative to the largest logit, in float32. serve: SGLang's log-probs were compared with "
        "transformers'. All of it was measured\n"
        "on a CPU with tiny models of the real architectures; docs/models.md has the figures, the "
        "versions and what is not covered."
    )
    for row in rows:
        if row.remark:
            output.note(f"{row.family}: {row.remark}")
    output.next_steps({"miles models MODEL": "parameters, memory and FLOPs of one model"})


def _row(row: FamilyRow) -> list[object]:
    logits = "not compared" if row.logits is None else f"{row.logits:.0e}"
    return [
        row.family,
        row.stands_for,
        _yes(row.convert),
        _yes(row.train),
        logits,
        _yes(row.serve_cpu),
    ]


def _yes(flag: bool) -> str:
    return "yes" if flag else "no"


def show_numbers(model: ModelNumbers, *, output: Output) -> None:
    """All that the planner rests on."""
    output.json("model", asdict(model))
    active = f", {format_count(model.num_active_parameters)} active" if model.num_experts else ""
    more = (
        f" + {format_count(model.num_mtp_parameters)} in MTP layers"
        if model.num_mtp_parameters
        else ""
    )
    experts = (
        {"experts": f"{model.num_experts}, {model.topk} per token"} if model.num_experts else {}
    )
    output.kv(
        {
            "family": model.family,
            "parameters": f"{model.num_parameters:,} "
            f"({format_count(model.num_parameters)}{active}){more}",
            "layers": ", ".join(f"{count} x {kind}" for kind, count in model.layers.items()),
            **experts,
            "vocabulary": f"{model.vocab_size:,}",
            "context": f"{model.max_position_embeddings:,}",
            "weights": f"{format_bytes(model.weights_bf16_bytes)} in bfloat16",
            "cache": f"{format_bytes(model.cache_bytes_per_token)} a token; "
            f"{format_bytes(model.cache_bytes_at_context)} for {model.context:,} tokens",
            "compute": f"{model.forward_flops_per_token / 1e9:,.2f} GFLOP a token forward (mean "
            f"over {model.context:,}), "
            "twice as much backward",
            **(
                {"beside the text model": "towers that are passed through export untouched"}
                if model.multimodal
                else {}
            ),
        }
    )
