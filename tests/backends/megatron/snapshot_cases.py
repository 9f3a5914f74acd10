"""Copies of a rank's state: taken, carried over to new ranks, and gone on from. Called by
`world.py` through `cases`."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tests.backends.megatron.harness import another_port, policy_shard, trainer

if TYPE_CHECKING:
    from milescli.backends.megatron.worker import TrainerRank

PART = 1 << 16
"""Bytes that are read and written at once."""


def snapshot_cases(models: dict[str, str]) -> list[dict[str, Any]]:
    """Of a world of two."""
    return [
        {"name": name, "call": "goes_on_from_copy", "model": models[model], **how}
        for name, model, how in (
            ("copy dense", "dense", {"layout": {"dp": 2}}),
            ("copy glm", "glm", {"layout": {"pp": 2}, "precision": "bf16"}),
            (
                "copy moe host",
                "moe",
                {
                    "layout": {"ep": 2, "dp": 2, "offload_optimizer": True},
                    "precision": "bf16",
                },
            ),
        )
    ]


def goes_on_from_copy(
    *,
    rank: int,
    size: int,
    port: int,
    model: str,
    layout: dict,
    precision: str = "fp32",
    critic: str | None = None,
) -> dict[str, Any]:
    """A step after a copy, by the ranks that took it and by new ones that were given it: what they
    report, and a hash of all that they hold then."""
    how = {"rank": rank, "size": size, "port": port, "model": model, "layout": layout}
    train = {"kl_coef": 0.1, **({"critic": {"lr": 1e-2}, "credit": "gae"} if critic else {})}
    first = trainer(**how, train=dict(train), precision=precision, critic=critic)
    first.freeze_reference()
    first.step(policy_shard(first, 0), 1e-2, 1e-2)
    sizes = first.take_copy()
    went_on = [_reported(first, 1)]  # the copy is read while the rank goes on
    copy = [_read(first, section, size) for section, size in enumerate(sizes)]
    went_on.append(held_hashes(first))
    how["port"] = another_port()
    first.close()

    new = trainer(**how, train=dict(train), precision=precision, critic=critic)
    torch.rand(3)
    new.expect_copy([sizes] * size)
    for section, parts in enumerate(copy):
        for number, part in enumerate(parts):
            new.write_copy(section, number * PART, part)
    new.take_over()
    restored = [_reported(new, 1), held_hashes(new)]
    new.close()
    return {"went on": went_on, "restored": restored, "sizes": sizes}


def random_states_return(
    *, rank: int, size: int, port: int, model: str, layout: dict, folder: str
) -> dict[str, bool]:
    """Whether host and device draw the same numbers again after a checkpoint, and after a copy. The
    device's generator is another of the host here."""
    made = trainer(rank=rank, size=size, port=port, model=model, layout=layout)
    of_device = torch.Generator().manual_seed(7)
    torch.cuda.get_rng_state = lambda device=None: of_device.get_state()
    torch.cuda.set_rng_state = lambda state, device=None: of_device.set_state(state)

    def drawn() -> list[float]:
        return [*torch.rand(3).tolist(), *torch.rand(3, generator=of_device).tolist()]

    made.save(folder, False)
    made.finish_save()
    made.take_copy()
    expected = drawn()
    made.load(folder)
    of_checkpoint = drawn()
    made.take_over()
    of_copy = drawn()
    made.close()
    return {"checkpoint": of_checkpoint == expected, "copy": of_copy == expected}


def _read(made: TrainerRank, section: int, size: int) -> list[np.ndarray]:
    return [
        made.read_copy(section, offset, min(PART, size - offset)).copy()
        for offset in range(0, size, PART)
    ]


def _reported(made: TrainerRank, step: int) -> dict[str, float]:
    report = made.step(policy_shard(made, step), 1e-2, 1e-2).report
    return {"loss": report.loss, "grad_norm": report.grad_norm, **report.figures}


def held_hashes(made: TrainerRank) -> list[str]:
    """Of each tensor that a copy has."""
    from milescli.backends.megatron.state.snapshot import tensors_of

    models = [made.policy] if made.critic is None else [made.policy, made.critic]
    tensors = [tensor for model in models for tensor in tensors_of(model)]
    tensors += [torch.get_rng_state(), *(made.learner.reference.frozen or [])]
    return [_hash(tensor) for tensor in tensors]


def _hash(tensor: torch.Tensor) -> str:
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(raw.numpy().tobytes()).hexdigest()
