"""Adapters beside models of every kind: under which layouts they train, and what they are held
against."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from milescli.export.adapter import read_trained_adapter, write_adapter, write_merged
from milescli.platform.ports import free_ports
from tests.backends.megatron.harness import (
    policy_shard,
    rows_shard,
    scores_everywhere,
    trainer,
)
from tests.backends.megatron.layouts import layout_case

RANK = {"lora": {"rank": 4}}
_FULL = {**RANK, "recompute": "full"}
KINDS = (
    *("dense", "tied", "moe", "moe-shared", "glm", "delta", "gemma4", "nemotron", "latent"),
    "sandwich",
)
"""Models in float32 whose adapters are held against merged weights: every family of layers, and of
names. (gpt-oss is in bfloat16 unless its config says otherwise, and merging rounds.)"""


SHARED = {"lora": {"rank": 4, "experts": "shared_outer"}}
_QUERIES = {"lora": {"rank": 4, "targets": ["q_proj", "v_proj"]}}
"""Of a hybrid model, whose first stage then has no adapter."""


def _case(name: str, *, train: dict | None = None, **layout: object) -> dict:
    model = name.split()[0].removeprefix("lora-").removesuffix("-shared")
    return layout_case(name, model, train=train or RANK, **layout)


LORA = {
    "one": [
        *(_case(f"lora-{kind}") for kind in ("dense", "moe", "delta", "latent")),
        _case("lora-moe-shared", train=SHARED),
        _case("lora-nemotron", train=_QUERIES),
    ],
    "two": [
        _case("lora-dense tp2", tp=2),
        _case("lora-dense tp2 sp recompute", train=_FULL, tp=2, sequence_parallel=True),
        _case("lora-dense pp2 recompute", train=_FULL, pp=2),
        _case("lora-dense dp2", dp=2),
        _case("lora-moe ep2 cp2", ep=2, cp=2),
        _case("lora-moe tp2 sp etp2", tp=2, etp=2, sequence_parallel=True),
        _case("lora-moe-shared ep2 cp2", train=SHARED, ep=2, cp=2),
        _case("lora-moe-shared tp2 sp ep2", train=SHARED, tp=2, ep=2, sequence_parallel=True),
        _case("lora-moe-shared tp2 sp etp2", train=SHARED, tp=2, etp=2, sequence_parallel=True),
        _case("lora-delta tp2", tp=2),
        _case("lora-latent tp2 sp ep2", tp=2, ep=2, sequence_parallel=True),
        _case("lora-nemotron pp2", train=_QUERIES, pp=2),
    ],
}
"""By world."""


def adapter_and_merged(
    *,
    rank: int,
    size: int,
    port: int,
    model: str,
    layout: dict,
    folder: str,
    experts: str = "each",
) -> dict[str, object]:
    """Steps with an adapter, and its checkpoint put into the model that it stands beside: the
    largest difference of log-probs between both, the smallest between the adapter's and the base's,
    whether the base stayed as it was, what one differs by that begins with the adapter, and whether
    engines that are sent merged weights hold those."""
    world = {"rank": rank, "size": size, "port": port, "layout": layout}
    lora = {"rank": 4, "type": "rslora", "experts": experts}
    made = trainer(model=model, train={"lora": lora}, **world)
    shard = policy_shard(made, 9)
    plain = scores_everywhere(made, shard)
    base = [weight.parameter.clone() for weight in made.policy.weights]
    for step in range(2):
        made.step(policy_shard(made, step), 1e-1)
    same = all(
        torch.equal(weight.parameter, before)
        for weight, before in zip(made.policy.weights, base, strict=True)
    )
    learned = scores_everywhere(made, shard)
    made.policy.merges_adapter = True
    sent = {name: each.clone() for some in made.policy.buckets_for_engines() for name, each in some}
    checkpoint, merged, given = (Path(folder) / part for part in ("saved", "merged", "given"))
    made.save(str(checkpoint), False)
    made.finish_save()
    made.close()
    adapter = read_trained_adapter(checkpoint, base=Path(model))
    assert adapter is not None
    write_merged(merged, adapter, base=Path(model))
    write_adapter(given, adapter)
    on_disk = load_file(merged / "model.safetensors")
    again = trainer(
        model=model,
        train={"lora": lora},
        adapter=str(given),
        **{**world, "port": free_ports(1)[0]},
    )
    begun = scores_everywhere(again, shard)
    again.close()
    whole = trainer(model=str(merged), train={}, **{**world, "port": free_ports(1)[0]})
    expected = scores_everywhere(whole, shard)
    whole.close()
    return {
        "difference": _difference(learned, expected),
        "learned": _difference(learned, plain),
        "base_is_same": same,
        "given": _difference(begun, learned),
        "sent": {name for name in sent if not torch.equal(sent[name], on_disk[name])},
        "unsent": on_disk.keys() - sent.keys(),
    }


def dropout_steps(
    *, rank: int, size: int, port: int, model: str, layout: dict
) -> dict[str, list[tuple[float, torch.Tensor]]]:
    """The loss and the gradients of three passes over the same rows with dropout, without and with
    recomputation. Before them comes the loss of `measure`, which has no dropout."""
    seen = {}
    for recompute in ("none", "full"):
        made = trainer(
            rank=rank,
            size=size,
            port=port if recompute == "none" else free_ports(1)[0],
            model=model,
            layout=layout,
            train={"lora": {"rank": 4, "dropout": 0.5}, "recompute": recompute},
        )
        chance = np.random.default_rng(0)
        rows = [chance.integers(0, made.facts.vocab_size, 20).tolist() for _ in range(4)]
        shard = rows_shard(made, rows)
        for _ in range(3):
            made.step(shard, 3e-2)
        measured = made.measure(shard).loss
        seen[recompute] = [(measured, torch.zeros(1))]
        for _ in range(3):
            loss = made.step(shard, None).report.loss
            gradients = [buffer.grad_data.clone() for buffer in made.policy.model.buffers]
            seen[recompute].append((loss, torch.cat(gradients)))
        made.close()
    return seen


def _difference(ours: list[list[float]], theirs: list[list[float]]) -> float:
    return float(max(np.abs(np.subtract(a, b)).max() for a, b in zip(ours, theirs, strict=True)))
