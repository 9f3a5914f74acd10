"""What a trainer rank really holds: bytes of weights, gradients, optimizer, and of what autograd
keeps at the peak of a step. Called by `world.py` through `cases`; the tests compare it with the
plan's memory model."""

from __future__ import annotations

import weakref
from collections import Counter

import torch


class SavedBytes:
    """Unique storages that autograd keeps, at their peak. `ignored`: storages that are counted
    elsewhere (weights)."""

    def __init__(self, ignored: set[int]) -> None:
        self.ignored = ignored
        self.held: Counter[int] = Counter()
        self.bytes = self.peak = 0
        self.shapes: dict[int, str] = {}
        self.at_peak: Counter[str] = Counter()

    def pack(self, tensor: torch.Tensor) -> _Kept:
        """As torch.autograd.graph.saved_tensors_hooks calls it."""
        storage = tensor.untyped_storage()
        key, size = storage.data_ptr(), storage.nbytes()
        kept = _Kept(tensor)
        if size and key not in self.ignored:
            self.held[key] += 1
            if self.held[key] == 1:
                self.bytes += size
                self.shapes[key] = f"{tuple(tensor.shape)} {tensor.dtype} {size}"
                if self.bytes > self.peak:
                    self.peak = self.bytes
                    self.at_peak = Counter(self.shapes.values())
            weakref.finalize(kept, self._release, key, size)
        return kept

    def _release(self, key: int, size: int) -> None:
        self.held[key] -= 1
        if not self.held[key]:
            self.bytes -= size
            del self.held[key], self.shapes[key]


class _Kept:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def unpack(kept: _Kept) -> torch.Tensor:
    """The inverse of `SavedBytes.pack`."""
    return kept.tensor


def measure_memory(
    *,
    rank: int,
    size: int,
    port: int,
    model: str,
    layout: dict,
    tokens: int,
    precision: str = "fp32",
    train: dict | None = None,
    indexer: str = "frozen",
) -> list[dict]:
    """[ranks] of bytes, by one update of `pp` microbatches of one sequence of `tokens` positions
    for each data-parallel rank."""
    import torch.distributed as dist

    from milescli.backends.megatron.state.optimizer import inner_optimizers
    from milescli.backends.megatron.step import stepping
    from milescli.train.objectives import load_objective
    from tests.backends.megatron import harness

    made = harness.trainer(
        rank=rank,
        size=size,
        port=port,
        model=model,
        layout=layout,
        precision=precision,
        train=train,
        indexer=indexer,
    )
    own = made.mesh.layout
    rng = torch.Generator().manual_seed(3)
    rows = [
        torch.randint(0, made.facts.vocab_size, (tokens + 1,), generator=rng).tolist()
        for _ in range(own.dp * own.pp)
    ]
    own_shard = made.learner._on_rank(harness.rows_shard(made, rows, cap=tokens))
    (microbatches,) = own_shard.updates
    if indexer != "frozen":
        stepping.begin_indexer_losses(own_shard, mesh=made.mesh)
    weight = made.recipe.train.mtp.loss_weight or 0.0
    (term,) = stepping.mtp_terms(own_shard, weight=weight, mesh=made.mesh)
    loss = stepping.UpdateLoss(
        mtp=term,
        objective=load_objective("supervised", made.recipe),
        shard=own_shard,
        mesh=made.mesh,
        measures_engine=False,
    )
    buffers = [*made.model.buffers, *made.model.expert_parallel_buffers]
    weights = {tensor.untyped_storage().data_ptr() for tensor in made.model.parameters()}
    saved = SavedBytes(weights)
    made.model.zero_grad_buffer()
    made.optimizer.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, unpack):
        made.policy.passes.train(microbatches, loss, temperature=1.0)
    made.optimizer.step()
    on_device, on_host = _optimizer_bytes(inner_optimizers(made.optimizer), weights)
    frozen = [tensor for tensor in made.model.parameters() if not tensor.requires_grad]
    mine = {
        "weights": sum(buffer.param_data.nbytes for buffer in buffers)
        + sum(tensor.nbytes for tensor in frozen),
        "gradients": sum(buffer.grad_data.nbytes for buffer in buffers),
        "optimizer": on_device,
        "host": on_host,
        "activations": saved.peak,
        "microbatches": len(microbatches),
        "shapes": dict(saved.at_peak),
    }
    everywhere: list[dict] = [{} for _ in range(size)]
    dist.all_gather_object(everywhere, mine)
    made.close()
    return everywhere


def _optimizer_bytes(inner: list, weights: set[int]) -> tuple[int, int]:
    """(on the device, on the host for its sake)"""
    from milescli.backends.megatron.state.host_adam import HostAdamW

    device = host = 0
    for each in inner:
        if each.optimizer is None:
            continue
        mains = [weight for group in each.optimizer.param_groups for weight in group["params"]]
        # what stands in for weights elsewhere has a shape without memory
        device += sum(
            weight.untyped_storage().nbytes()
            for weight in mains
            if weight.untyped_storage().data_ptr() not in weights
        )
        moments = [
            value
            for state in each.optimizer.state.values()
            for name, value in state.items()
            if name != "step"
        ]
        size = sum(value.nbytes for value in moments if torch.is_tensor(value))
        if isinstance(each.optimizer, HostAdamW):
            host += size + sum(copy.nbytes for copy, _ in each.optimizer.copies.values())
        else:
            device += size
    return device, host


def plain_steps(
    *,
    rank: int,
    size: int,
    port: int,
    model: str,
    layout: dict,
    precision: str,
    fused: bool = False,
) -> list[tuple[float, float]]:
    """(loss, gradient norm) of three policy steps. `fused`: by the kernel that accelerators
    take."""
    from milescli.backends.megatron.state.optimizer import fuse
    from tests.backends.megatron import harness

    made = harness.trainer(
        rank=rank, size=size, port=port, model=model, layout=layout, precision=precision
    )
    if fused:
        fuse(made.optimizer)
    reports = [made.step(harness.policy_shard(made, step), 1e-2).report for step in range(3)]
    made.close()
    return [(report.loss, report.grad_norm) for report in reports]


def published_and_stepped(
    *, rank: int, size: int, port: int, model: str, layout: dict, precision: str
) -> dict:
    """What is published of a folder's weights, log-probs, and three steps on one batch of rows."""
    from tests.backends.megatron import harness

    made = harness.trainer(
        rank=rank, size=size, port=port, model=model, layout=layout, precision=precision
    )
    published = {
        name: tensor.detach().clone().contiguous()
        for bucket in made.buckets()
        for name, tensor in bucket
    }
    scores = harness.scores_everywhere(made, harness.policy_shard(made, 9))
    rng = torch.Generator().manual_seed(5)
    rows = [
        torch.randint(0, made.facts.vocab_size, (length,), generator=rng).tolist()
        for length in (31, 7, 12, 40)
    ]
    reports = [made.step(harness.rows_shard(made, rows), 1e-3).report for _ in range(3)]
    made.close()
    return {"published": published, "scores": scores, "reports": reports}
