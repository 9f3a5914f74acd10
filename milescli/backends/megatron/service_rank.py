"""One trainer rank of `miles serve --recipe`: it trains the adapters of many clients in turn. A
client decides when gradients are computed and when they are applied; between its turns its
matrices, moments, random state and gradients wait in host memory."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from milescli.backends.megatron.state.optimizer import set_step
from milescli.backends.megatron.state.saving import release_state
from milescli.backends.megatron.state.snapshot import Reference, Snapshot
from milescli.backends.megatron.worker import TrainerRank
from milescli.checkpoint.store import save_failed
from milescli.train.base import StepResult, TrainShard
from milescli.train.optimizers import AdamStep


@dataclass(slots=True, kw_only=True)
class _Client:
    """Holds what belongs to one client's adapter."""

    state: Snapshot
    """Matrices, moments and random state at the end of the client's last turn."""
    gradients: list[torch.Tensor] | None = None
    """[buffers] sums of gradients since its last step; None if there are none. On the device in
    the client's turn."""

    def move_gradients(self, device: torch.device) -> None:
        """Move the gradients, if there are any."""
        if self.gradients is not None:
            self.gradients = [each.to(device) for each in self.gradients]


class ServiceRank(TrainerRank):
    """Trains the adapters of all clients, by name. Each method is called on all ranks at once."""

    def _build(self) -> None:
        super()._build()
        self._clients = dict[str, _Client]()
        self._active: str | None = None
        self._fresh = self._new_snapshot()
        self._snapshot_bytes = sum(self._fresh.take())

    def _new_snapshot(self) -> Snapshot:
        return Snapshot(
            [self.policy],
            Reference(self.policy.model),
            awake=lambda _: nullcontext(),
            device=self.device,
        )

    def client_bytes(self) -> int:
        """Return the bytes of host memory that an adapter needs between its turns: matrices,
        moments, random state and gradients."""
        return self._snapshot_bytes + sum(each.nbytes for each in self._buffers)

    def take_turn(self, adapter: str) -> None:
        """Switch to this adapter. A new one has no matrices before `begin_adapter` or
        `restore_adapter`."""
        if adapter == self._active:
            return
        self._leave()
        if (known := self._clients.get(adapter)) is not None:
            known.state.restore()
            known.move_gradients(self.device)
        else:
            self._fresh.restore()
            self._clients[adapter] = _Client(state=self._new_snapshot())
        self._active = adapter

    def _leave(self) -> None:
        if self._active is not None:
            self._client.state.take()
            self._client.move_gradients(torch.device("cpu"))
            self._active = None

    @property
    def _client(self) -> _Client:
        """Return the client whose turn it is."""
        assert self._active is not None, "a call in nobody's turn"
        return self._clients[self._active]

    def begin_adapter(self, seed: int) -> None:
        """Initialise the adapter, which is new, as a run of its own with this seed would."""
        self.policy.begin_adapter(seed, None)

    def drop_adapter(self, name: str) -> None:
        """Delete an adapter."""
        self._clients.pop(name, None)
        if self._active == name:
            self._active = None

    def accumulate(self, shard: TrainShard, *, backward: bool) -> StepResult:
        """Compute the loss, and with `backward` add its gradients to the adapter's sums. Return the
        report and the log-probs of `shard.logprob_ids`. Raises NotFiniteError, and then adds
        nothing."""
        with self._named("computing gradients"):
            stepped = self.learner.accumulate(shard, backward=backward)
        if backward:
            self._client.gradients = self._sums(self._client.gradients)
        return stepped

    def _sums(self, before: list[torch.Tensor] | None) -> list[torch.Tensor]:
        """Return the gradients in the buffers plus those of `before`."""
        if before is None:
            return [buffer.clone() for buffer in self._buffers]
        for total, buffer in zip(before, self._buffers, strict=True):
            total += buffer
        return before

    @property
    def _buffers(self) -> list[torch.Tensor]:
        wrapped = self.policy.model
        return [each.grad_data for each in (*wrapped.buffers, *wrapped.expert_parallel_buffers)]

    def apply(self, step: AdamStep) -> float:
        """Make one AdamW step with the gradients summed since the last one (zero if there are
        none). Return their global L2 norm before clipping."""
        gradients = self._client.gradients
        self.policy.model.zero_grad_buffer()
        self.policy.optimizer.zero_grad()
        for buffer, total in zip(self._buffers, gradients or (), strict=bool(gradients)):
            buffer.copy_(total)
        set_step(self.policy.optimizer, step)
        with self._named("an optimizer step"):
            norm = self.policy.update(step.lr)
        self._client.gradients = None
        return norm

    def adapter_tensors(self) -> dict[str, torch.Tensor]:
        """Return the adapter's matrices by PEFT's names, float32, on rank 0; empty elsewhere."""
        return {
            key: tensor.detach().to("cpu", torch.float32, copy=True)
            for bucket in self.policy.buckets()
            for key, tensor in bucket
            if self.rank == 0
        }

    def save_adapter(self, folder: Path) -> None:
        """Write matrices, moments and random state of the adapter into `folder`, which is created.
        Return when the files are complete. Raises CheckpointError."""
        self.save(folder, async_save=False)
        self.finish_save()

    def load_adapter(self, folder: Path, *, with_optimizer: bool) -> None:
        """Load what `save_adapter` wrote; without the optimizer, reset the moments. Gradients are
        dropped. Raises CheckpointError for an adapter of another shape or base model."""
        self._client.gradients = None
        self.load(folder, weights_only=not with_optimizer)
        if not with_optimizer:
            release_state()
            self.policy.reset_optimizer()

    def keep_adapter(self, folder: Path) -> None:
        """Write the complete state of the adapter, including gradients, for ranks of the same
        layout that replace these. Return when the files are complete. Raises CheckpointError."""
        self.save_adapter(folder)
        gradients = {str(n): each for n, each in enumerate(self._client.gradients or ())}
        if gradients:
            try:
                save_file(gradients, self._gradients_in(folder))
            except (OSError, SafetensorError) as error:
                why = f"trainer rank {self.rank}: {error}"
                raise save_failed(folder, why) from error

    def restore_adapter(self, folder: Path) -> None:
        """Load what `keep_adapter` wrote into a new adapter. Raises CheckpointError."""
        self.load(folder)
        if (file := self._gradients_in(folder)).exists():
            tensors = load_file(file, device=str(self.device))
            self._client.gradients = [tensors[str(n)] for n in range(len(tensors))]

    def _gradients_in(self, folder: Path) -> Path:
        return folder / f"gradients-{self.rank}.safetensors"
