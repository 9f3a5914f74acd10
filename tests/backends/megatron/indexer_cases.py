"""Indexers of sparse attention that are trained beside the policy: under which layouts, and what
they are held against."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from safetensors.torch import save_file

from milescli.platform.ports import free_ports
from tests.backends.megatron.harness import policy_shard, rows_shard, trainer
from tests.backends.megatron.layouts import TOKEN_ROWS
from tests.backends.megatron.plain_indexer import Plain

LONG_ROWS = [*TOKEN_ROWS, [(7 * place * place + 3) % 131 for place in range(30)]]
_FULL = {"recompute": "full"}
_SP = {"tp": 2, "sequence_parallel": True}
LAYOUTS: dict[str, tuple[int, str, dict]] = {
    # name -> (ranks, model, layout; recompute goes with it)
    "sparse one": (1, "sparse", {}),
    "v4 one": (1, "v4", {}),
    "sparse recompute": (1, "sparse", _FULL),
    "v4 recompute": (1, "v4", _FULL),
    "sparse tp2 sp etp2": (2, "sparse", {**_SP, "etp": 2}),
    "sparse tp2 sp ep2 recompute": (2, "sparse", {**_SP, "ep": 2, **_FULL}),
    "sparse pp2": (2, "sparse", {"pp": 2}),
    "sparse dp2": (2, "sparse", {"dp": 2}),
    "v4 tp2 sp etp2 recompute": (2, "v4", {**_SP, "etp": 2, **_FULL}),
    "v4 pp2": (2, "v4", {"pp": 2}),
    "v4 dp2": (2, "v4", {"dp": 2}),
}


def indexer_steps(
    *, rank: int, size: int, port: int, model: str, layout: dict, save: str
) -> list[dict]:
    """Three policy steps that train the indexers. To `save`: the indexers' gradients before, where
    one data-parallel rank has them, and their weights after the first."""
    parts = dict(layout)
    train = {"recompute": parts.pop("recompute", "none"), "updates_per_step": 2}
    made = trainer(
        rank=rank, size=size, port=port, model=model, layout=parts, train=train, indexer="kl"
    )
    tensors = {}
    if made.mesh.layout.dp == 1:
        made.step(policy_shard(made, 0), None)
        tensors |= _indexers(made, "gradient", lambda weight: getattr(weight, "main_grad", weight))
    reports = [made.step(policy_shard(made, 0), 1e-2).report]
    tensors |= _indexers(made, "weight", lambda weight: weight)
    if rank == 0:
        save_file(tensors, save)
    reports += [made.step(policy_shard(made, step, updates=step), 1e-2).report for step in (1, 2)]
    made.close()
    return reports


def _indexers(made, kind: str, of_weight) -> dict[str, torch.Tensor]:
    """Whole tensors under Hugging Face's names."""
    from milescli.backends.megatron.state.gathering import hf_buckets

    local = [replace(each, parameter=of_weight(each.parameter)) for each in made.policy.weights]
    buckets = hf_buckets(local, made.policy.table, mesh=made.mesh, bucket_bytes=2**30)
    return {
        f"{kind} {name}": tensor.detach().clone().contiguous()
        for bucket in buckets
        for name, tensor in bucket
        if ".indexer." in name
    }


def indexer_gradients(*, rank: int, size: int, port: int, model: str, layout: dict) -> dict:
    """Of one update on rows of tokens: the gradients of the indexers and the divergence, by the
    trainer and by plain PyTorch from what the attention was given."""
    world = {"rank": rank, "size": size, "port": port, "model": model, "layout": layout}
    made = trainer(indexer="kl", **world)
    plain = Plain(made.model.module, made.facts)
    shard = rows_shard(made, LONG_ROWS, cap=32)
    report = made.step(shard, None).report
    ours = {
        name: weight.main_grad.clone()
        for name, weight in made.model.module.named_parameters()
        if ".indexer." in name
    }
    made.close()
    return {
        "ours": ours,
        "plain": {name: grad / report.num_tokens for name, grad in plain.gradients.items()},
        "figure": report.figures["indexer_kl"],
        "divergence": plain.total / report.num_tokens / made.policy.facts.num_indexers,
        "microbatches": report.num_microbatches,
    }


def indexer_packed(*, rank: int, size: int, port: int, model: str, layout: dict) -> dict:
    """Rows packed together and one by one: the divergence, and the indexers' gradients."""
    world = {"rank": rank, "size": size, "port": port, "model": model, "layout": layout}
    made = trainer(indexer="kl", **world)
    figures, gradients, counts = [], [], []
    for cap in (96, max(map(len, LONG_ROWS))):
        report = made.step(rows_shard(made, LONG_ROWS, cap=cap), None).report
        figures.append(report.figures["indexer_kl"])
        counts.append(report.num_microbatches)
        gradients.append(
            {
                name: weight.main_grad.clone()
                for name, weight in made.model.module.named_parameters()
                if ".indexer." in name
            }
        )
    made.close()
    return {"figures": figures, "gradients": gradients, "microbatches": counts}


def indexer_apart(*, rank: int, size: int, port: int, model: str, layout: dict) -> dict:
    """A step with indexers frozen and one with them trained: what differs of the weights after it,
    of the reports, and what a frozen indexer has of a gradient."""
    seen: dict[str, dict[str, torch.Tensor]] = {}
    reports, held = {}, {}
    for mode in ("frozen", "kl"):
        made = trainer(
            rank=rank,
            size=size,
            port=port if mode == "frozen" else free_ports(1)[0],
            model=model,
            layout=layout,
            # such a norm is always clipped
            train={"optimizer": {"clip_grad": 1e-3}},
            indexer=mode,
        )
        before = {name: each.detach().clone() for name, each in _named(made)}
        reports[mode] = made.step(policy_shard(made, 0), 1e-2).report
        seen[mode] = {name: each.detach().clone() for name, each in _named(made)}
        moved = {name for name, each in seen[mode].items() if not torch.equal(each, before[name])}
        held[mode] = {
            "indexers": {name for name in seen[mode] if ".indexer." in name},
            "moved": {name for name in moved if ".indexer." in name},
            "gradients": {
                name for name, each in _named(made) if ".indexer." in name and each.requires_grad
            },
            "sent": {
                name
                for bucket in made.policy.buckets_for_engines()
                for name, _ in bucket
                if ".indexer." in name
            },
        }
        made.close()
    differ = {n for n in seen["kl"] if not torch.equal(seen["kl"][n], seen["frozen"][n])}
    return {"differ": differ, "reports": reports, **held}


def _named(made) -> list[tuple[str, torch.nn.Parameter]]:
    return list(made.model.module.named_parameters())


def indexer_learns(
    *, rank: int, size: int, port: int, model: str, layout: dict, steps: int
) -> dict:
    """The indexers learn from the same rows again and again, and nothing else does, as no token has
    a weight in the objective's loss."""
    made = trainer(
        rank=rank,
        size=size,
        port=port,
        model=model,
        layout=layout,
        train={"optimizer": {"weight_decay": 0.0, "eps": 1e-8}},
        indexer="kl",
    )
    before = {name: each.detach().clone() for name, each in _named(made)}
    shard = rows_shard(made, LONG_ROWS, cap=64)
    shard = replace(shard, loss_weights=np.zeros_like(shard.loss_weights))
    figures = [made.step(shard, 3e-3).report.figures["indexer_kl"] for _ in range(steps)]
    moved = {name for name, each in _named(made) if not torch.equal(each, before[name])}
    made.close()
    return {"figures": figures, "moved": {name for name in moved if ".indexer." not in name}}


def indexer_goes_on(
    *,
    rank: int,
    size: int,
    port: int,
    model: str,
    layout: dict,
    save: str = "",
    load: str = "",
) -> dict:
    """A step that is saved, or loaded, and the next one: its report, and the weights after it."""
    world = {"rank": rank, "size": size, "port": port, "model": model, "layout": layout}
    made = trainer(indexer="kl", **world)
    if load:
        made.load(load)
    else:
        made.step(policy_shard(made, 0), 1e-2)
        made.save(save, True)
        made.finish_save()
    report = made.step(policy_shard(made, 1), 1e-2).report
    weights = {name: t.clone() for bucket in made.buckets() for name, t in bucket}
    made.close()
    return {"report": report, "indexers": {n: t for n, t in weights.items() if ".indexer." in n}}
