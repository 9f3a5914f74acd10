"""An MTP layer that is trained beside the policy: under which layouts, and what it is held
against."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from safetensors.torch import save_file

from milescli.platform.ports import free_ports
from tests.backends.megatron.harness import policy_shard, rows_shard, trainer
from tests.backends.megatron.layouts import TOKEN_ROWS, layout_case

TRAINED = {"mtp": {"loss_weight": 0.3}}
TRUNK = {"mtp": {"loss_weight": 0.3, "trains_trunk": True}}
_FULL = {"recompute": "full"}
_SEQUENCE = {"tp": 2, "sequence_parallel": True}
_CALM = {**TRAINED, "optimizer": {"eps": 0.1}}
"""As in `layouts`."""
MTP = {
    "one": [
        layout_case("mtp", "mtp", train=TRAINED),
        layout_case("mtpglm", "mtpglm", train=TRAINED),
        layout_case("mtptrunk", "mtp", train=TRUNK),
        layout_case("mtpmimo", "mtpmimo", train=TRAINED),
        layout_case("mtpv4", "mtpv4", train=TRUNK),
        layout_case("mtpnext", "mtpnext", train=_CALM),
    ],
    "two": [
        layout_case("mtp tp2 sp ep2", "mtp", train=TRAINED, **_SEQUENCE, ep=2),
        layout_case("mtp pp2 uneven", "mtp", train=TRAINED, pp=2),
        layout_case("mtp cp2 ep2", "mtp", train=TRAINED, cp=2, ep=2),
        layout_case("mtp dp2 recompute", "mtp", train={**TRAINED, **_FULL}, dp=2),
        layout_case("mtpglm tp2 sp etp2", "mtpglm", train=TRAINED, **_SEQUENCE, etp=2),
        layout_case(
            "mtptrunk tp2 sp etp2 recompute", "mtp", train={**TRUNK, **_FULL}, **_SEQUENCE, etp=2
        ),
        layout_case("mtptrunk pp2 recompute", "mtp", train={**TRUNK, **_FULL}, pp=2),
        layout_case("mtpmimo pp2", "mtpmimo", train=TRAINED, pp=2),
        layout_case(
            "mtpv4 tp2 sp ep2 recompute", "mtpv4", train={**TRUNK, **_FULL}, **_SEQUENCE, ep=2
        ),
        layout_case("mtpv4 pp2 uneven", "mtpv4", train=TRUNK, pp=2),
        layout_case(
            "mtpnext tp2 sp ep2 recompute", "mtpnext", train={**_CALM, **_FULL}, **_SEQUENCE, ep=2
        ),
        layout_case("mtpnext cp2 ep2", "mtpnext", train=_CALM, cp=2, ep=2),
    ],
}
"""By world. Experts under tensor parallelism need sequence parallelism."""
_OF_LAYER = "mtp."


def next_logprobs(
    *, rank: int, size: int, port: int, model: str, layout: dict
) -> list[list[float]]:
    """Of each of TOKEN_ROWS, by the MTP layer: log-probs of its tokens from the third, at
    temperature 1."""
    made = trainer(rank=rank, size=size, port=port, model=model, layout=layout, train=dict(TRAINED))
    own = made.learner._on_rank(rows_shard(made, TOKEN_ROWS))
    rows: dict[int, list[float]] = {}

    def keep(microbatch, outputs) -> torch.Tensor:
        for place, index in enumerate(microbatch.indices):
            which = (microbatch.places.sequence == place) & microbatch.after.mask
            rows[int(own.shard.sequence_ids[index])] = outputs.next_logprobs[which].tolist()
        return outputs.next_logprobs.sum()

    made.policy.passes.train(own.microbatches, keep, temperature=1.0)
    made.close()
    return [rows[number] for number in range(len(TOKEN_ROWS))]


def trunk_differs(*, rank: int, size: int, port: int, model: str, layout: dict) -> dict:
    """Names of weights that differ after two steps, between a run that trains the MTP layer and one
    that does not; and what moved in the first."""
    world = {"rank": rank, "size": size, "model": model, "layout": layout}

    def weights_after(steps: int, train: dict, port: int) -> tuple[dict[str, torch.Tensor], list]:
        made = trainer(port=port, train=dict(train), **world)
        reports = [made.step(policy_shard(made, step), 1e-2).report for step in range(steps)]
        named = dict(made.model.module.named_parameters())
        kept = {name: weight.detach().clone() for name, weight in named.items()}
        made.close()
        return kept, [(report.loss, report.grad_norm) for report in reports]

    plain, expected = weights_after(2, {}, port)
    first, _ = weights_after(0, TRAINED, *free_ports(1))
    last, reports = weights_after(2, TRAINED, *free_ports(1))
    trunk, _ = weights_after(2, TRUNK, *free_ports(1))
    layer = [name for name in last if name.startswith(_OF_LAYER)]
    return {
        "of_trunk": [name for name in plain if not torch.equal(plain[name], last[name])],
        "still": [name for name in layer if torch.equal(first[name], last[name])],
        "same_reports": reports == expected,
        "trained_trunk": [name for name in plain if not torch.equal(plain[name], trunk[name])],
    }


def layer_learns(
    *,
    rank: int,
    size: int,
    port: int,
    model: str,
    layout: dict,
    rows: list[list[int]],
    steps: int,
    save: str,
) -> list[float]:
    """The MTP layer learns from rows, and nothing else learns, as no token has a weight in the
    objective's loss: its loss at each step. What would be published goes to `save`."""
    train = {"mtp": {"loss_weight": 1.0}, "optimizer": {"weight_decay": 0.0}}
    made = trainer(rank=rank, size=size, port=port, model=model, layout=layout, train=train)
    shard = rows_shard(made, rows, cap=2048)
    shard = replace(shard, loss_weights=np.zeros_like(shard.loss_weights))
    losses = [made.step(shard, 3e-3).report.figures["mtp_loss"] for _ in range(steps)]
    published = {
        name: tensor.detach().clone().contiguous()
        for bucket in made.buckets()
        for name, tensor in bucket
    }
    save_file(published, save)
    made.close()
    return losses


def packed_and_single(*, rank: int, size: int, port: int, model: str, layout: dict) -> dict:
    """Rows packed together and one by one: the loss, and the largest difference of a gradient of
    the layer between both."""
    made = trainer(rank=rank, size=size, port=port, model=model, layout=layout, train=dict(TRAINED))
    losses, gradients, counts = [], [], []
    for cap in (64, max(map(len, TOKEN_ROWS))):
        shard = rows_shard(made, TOKEN_ROWS, cap=cap)
        report = made.step(shard, None).report
        losses.append(report.figures["mtp_loss"])
        counts.append(report.num_microbatches)
        gradients.append(
            {
                name: weight.main_grad.clone()
                for name, weight in made.model.module.named_parameters()
                if name.startswith(_OF_LAYER)
            }
        )
    made.close()
    return {
        "losses": losses,
        "microbatches": counts,
        "gradient": max(
            float((gradients[0][name] - gradients[1][name]).abs().max()) for name in gradients[0]
        ),
        "largest": max(float(gradient.abs().max()) for gradient in gradients[0].values()),
    }
