"""One layer of a model as a trainer rank builds it, on this device; and how far results are from
a reference. Used by `numerics` and `attention`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from shapes import config_of

from checks import Visit
from milescli.platform.ports import free_ports

BF16, FP32 = 1e-2, 1e-5
"""Bounds of relative errors. A bfloat16 is right to 2^-9; a few roundings one after the other come
to 3e-3 to 5e-3. A float32 is right to 6e-8, and sums of thousands to 1e-6."""
BF16_GRADIENT = 2e-2
"""Products of what has been rounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OneLayer:
    """In bfloat16: 16 heads of 128 in 8 groups (in small on a CPU), and experts."""

    visit: Visit
    facts: object
    model: torch.nn.Module
    device: torch.device

    @classmethod
    def of(cls, visit: Visit) -> OneLayer:
        from milescli.backends.megatron import mesh
        from milescli.backends.megatron.architecture import model
        from milescli.backends.megatron.layers import attention
        from milescli.models import parse_facts
        from milescli.plan.types import TrainerLayout

        small = {"num_hidden_layers": 1, "vocab_size": 512}
        if visit.on_device:
            small["num_key_value_heads"] = 8
        facts = parse_facts(config_of("small-moe", visit) | small)
        device = torch.device("cuda", 0) if visit.on_device else torch.device("cpu")
        if visit.on_device:
            torch.cuda.set_device(device)
            attention.avoid_cudnn()  # as a trainer rank does
        layout = TrainerLayout()
        own_mesh = mesh.bring_up(
            layout=layout,
            rank=0,
            master=("127.0.0.1", free_ports(1)[0]),
            backend="nccl" if visit.on_device else "gloo",
            device=device,
            timeouts_s=(60, 60),
        )
        config = model.build_config(
            facts,
            layout,
            dtype=torch.bfloat16,
            device=device,
            recompute="none",
            routing_replay=False,
        )
        built = model.build_model(config, facts, own_mesh)
        with torch.no_grad():
            for parameter in built.parameters():
                parameter.normal_(std=0.05)
                if parameter.dim() == 1:
                    parameter.add_(1.0)
        return cls(visit=visit, facts=facts, model=built, device=device)

    @property
    def layer(self) -> torch.nn.Module:
        return self.model.decoder.layers[0]

    def close(self) -> None:
        from milescli.backends.megatron import mesh

        mesh.tear_down()

    def row(self, lengths: Sequence[int]):
        """The packed row of sequences of these lengths, as the trainer makes it."""
        from milescli.backends.megatron.layers.attention import pack_row
        from milescli.backends.megatron.step.rows import RowShape, make_row

        starts = np.cumsum([0, *lengths])
        spans = [(int(start), length) for start, length in zip(starts, lengths, strict=False)]
        shape = RowShape()
        layout = make_row(spans, shape=shape)
        return pack_row(layout, shape=shape, facts=self.facts, device=self.device)

    def heads(self, num_positions: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Random query [S, heads, d], key and value [S, groups, d], with gradient."""
        heads, groups = self.facts.num_heads, self.facts.num_kv_heads
        return [
            torch.randn(num_positions, count, self.facts.head_dim, device=self.device)
            .to(dtype)
            .requires_grad_()
            for count in (heads, groups, groups)
        ]

    def attend(self, query, key, value, row) -> torch.Tensor:
        """By the trainer's own module -> [S, heads * d]"""
        core = self.layer.self_attention.core_attention
        return core(query, key, value, None, packed_seq_params=row)


def apart(mine: torch.Tensor, reference: torch.Tensor) -> float:
    wide = reference.detach().double()
    return float((mine.detach().double() - wide).norm() / wide.norm())


def worst(parts: dict[str, float]) -> float:
    """NaN where any is."""
    return float(np.max(list(parts.values())))
