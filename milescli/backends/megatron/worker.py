"""One trainer rank: model, optimizer and weight channel of this process. Methods are called by name
on all ranks at once with equal arguments, except for the shard, which belongs to the rank's
data-parallel rank; each returns plain data. Does not depend on what hosts the process."""

from __future__ import annotations

import hashlib
import importlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.distributed as dist

from milescli.backends.megatron.cpu_compat import select_device
from milescli.backends.megatron.profiling import ProfilingMixin
from milescli.checkpoint.base import CRITIC_PART, DRAFT_PART
from milescli.core.errors import CheckpointError, MilesError, WaitTimeout
from milescli.core.plug_points import FORMATS
from milescli.core.silence import sounds_like_lost_peer
from milescli.core.types import ROLLOUT, EngineAddress, StepReport, WeightVersion
from milescli.models import load_facts
from milescli.models.adapter import engine_name
from milescli.plan.legal import check_layout
from milescli.plan.types import Plan
from milescli.recipe.schema import Recipe
from milescli.train.base import StepResult, TrainShard
from milescli.weights.base import Bucket, DraftChannel, WeightChannel
from milescli.weights.formats import HF, formatted

if TYPE_CHECKING:
    from milescli.backends.megatron.learner import Learner
    from milescli.backends.megatron.loaded_model import LoadedModel
    from milescli.backends.megatron.state.snapshot import Reference
    from milescli.backends.megatron.trained_model import TrainedModel


class TrainerRank(ProfilingMixin):
    """Holds the models of one rank, and executes the calls of `train.base.Trainer` on them. Call
    `setup` first and `close` last."""

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        master_addr: str,
        master_port: int,
        recipe: Recipe,
        plan: Plan,
        model_dir: str,
        channel: str | None = None,
        channel_place: object = None,
        critic_dir: str | None = None,
        draft_dir: str | None = None,
        teacher_dirs: Sequence[str] = (),
        adapters: Mapping[str, Recipe] | None = None,
    ) -> None:
        """Store the arguments; use no device and open nothing. `model_dir`: Hugging Face folder;
        `critic_dir`: that of the critic, which gives scores, or None; `draft_dir`: that of the
        draft model, if it is trained; `teacher_dirs`: those of `train.distill.teachers`, if the
        ranks hold them; `adapters`: name -> recipe, if several adapters are trained; `channel`:
        import path `module:Class` of the weight channel, or None if nothing is published;
        `channel_place`: for a channel that sends files, the folder, or the name of a
        store."""
        assert world_size == plan.trainer.world_size, (world_size, plan.trainer)
        self.rank = rank
        self.master = (master_addr, master_port)
        self.recipe, self.plan = recipe, plan
        self.model_dir = Path(model_dir)
        self.critic_dir = Path(critic_dir) if critic_dir else None
        self.draft_dir = Path(draft_dir) if draft_dir else None
        self.teacher_dirs = [Path(folder) for folder in teacher_dirs]
        self.adapters = adapters or {}
        self.channel_path, self.channel_place = channel, channel_place
        self.dtype = torch.bfloat16 if plan.precision == "bf16" else torch.float32

    def setup(self) -> dict[str, float]:
        """Join the other ranks, build the model, load its weights, and create the optimizer. Return
        seconds per part. Raises FitError, CheckpointError, or WaitTimeout if not all ranks join."""
        started = time.monotonic()
        if self.channel_path is not None:
            getattr(self._channel_class(), "require_node", lambda: None)()
        self.device = select_device(self.plan)
        self.facts = load_facts(self.model_dir)
        from milescli.backends.megatron import mesh

        check_layout(self.plan.trainer, self.facts)
        limits = self.recipe.machine
        self.mesh = mesh.bring_up(
            layout=self.plan.trainer,
            rank=self.rank,
            master=self.master,
            backend=self.plan.collective,
            device=self.device,
            timeouts_s=(limits.start_timeout_s, limits.step_timeout_s),
        )
        joined = time.monotonic()
        self._build()
        self.channels: dict[str, WeightChannel] = {}
        self._bypassed: dict[str, torch.Tensor] = {}
        self.format = FORMATS.load(self.recipe.weights.format)
        return {"join_s": joined - started, "build_s": time.monotonic() - joined}

    def _build(self) -> None:
        from milescli.backends.megatron.rank_models import AdapterSwitcher, build_models
        from milescli.backends.megatron.state.snapshot import Reference, Snapshot

        models = build_models(
            policy=self.model_dir,
            critic=self.critic_dir,
            draft=self.draft_dir,
            teachers=self.teacher_dirs,
            recipe=self.recipe,
            plan=self.plan,
            mesh=self.mesh,
            dtype=self.dtype,
            facts=self.facts,
        )
        self.policy, self.critic, self.draft = models.policy, models.critic, models.draft
        self.learner = self._learner(self.recipe, Reference(self.policy.model), models.teachers)
        self.turns = None
        if self.adapters:
            self.turns = AdapterSwitcher(
                self.policy, self.adapters, learner_of=self._learner, device=self.device
            )
            self.learner = self.turns.learner
        self.snapshot = Snapshot(
            [model for model, _ in self._trained(Path())],
            self.learner.reference,
            awake=self._awake,
            device=self.device,
        )

    def _learner(
        self, recipe: Recipe, reference: Reference, teachers: Sequence[LoadedModel] = ()
    ) -> Learner:
        from milescli.backends.megatron.learner import Learner

        return Learner(
            recipe=recipe,
            mesh=self.mesh,
            policy=self.policy,
            critic=self.critic,
            draft=self.draft,
            reference=reference,
            teachers=list(teachers),
            shares_prompts=self.plan.batch.shares_prompts,
        )

    @property
    def model(self):
        """Return the policy's model, wrapped in Megatron's DistributedDataParallel."""
        return self.policy.model

    @property
    def optimizer(self):
        """Return the policy's optimizer."""
        return self.policy.optimizer

    def _channel_class(self) -> Any:
        assert self.channel_path is not None, "this trainer was made without a weight channel"
        module, _, name = self.channel_path.partition(":")
        return getattr(importlib.import_module(module), name)

    def _make_channel(self) -> WeightChannel:
        channel = self._channel_class()(
            backend=self.plan.collective,
            host=self.master[0],
            timeout_s=self.recipe.machine.request_timeout_s,
        )
        if hasattr(channel, "full_every"):
            channel.full_every = self.recipe.weights.full_every
        if hasattr(channel, "place"):
            channel.place = self.channel_place
        return channel

    def step(
        self, shard: TrainShard, lr: float | None, critic_lr: float | None = None
    ) -> StepResult:
        """Take an optimizer step, as `Learner.step` does; the report is equal on all ranks."""
        self.reset_peak_memory()
        with self._named("an optimizer step"):
            stepped = self.learner.step(shard, lr, critic_lr)
        return replace(stepped, memory=(self.memory_used(),))

    def measure(self, shard: TrainShard) -> StepReport:
        """Return the loss and figures of the batch; nothing changes."""
        with self._named("measuring a loss"):
            return self.learner.measure(shard)

    def score(
        self, shard: TrainShard, with_other_rounding: bool = False
    ) -> list[np.ndarray] | None:
        """Return [n] log-probs of each sequence, on ranks that report its tokens."""
        with self._named("scoring samples"):
            return self.learner.score(shard, with_other_rounding=with_other_rounding)

    def score_by_teachers(self, shard: TrainShard) -> list[tuple[np.ndarray, np.ndarray]] | None:
        """Return [n, k] tokens and log-probs of each sequence, on ranks that report its tokens."""
        with self._named("asking teachers"):
            return self.learner.score_by_teachers(shard)

    def free_teachers(self) -> None:
        """Free the memory of the teachers."""
        self.learner.teachers.clear()

    def freeze_reference(self) -> None:
        """Copy the current weights to host memory as the reference of the KL term."""
        self.learner.reference.freeze()

    def reset_optimizer(self) -> None:
        """Reset the moments of the policy's optimizer."""
        self.policy.reset_optimizer()

    def save(self, folder: str | Path, async_save: bool | None = None) -> None:
        """Write weights, optimizer and RNG into `folder`, which is created. With `async_save`
        (None: as in the recipe), training may continue at once and the files are complete after
        `finish_save`."""
        if async_save is None:
            async_save = self.recipe.checkpoint.async_save
        with self._named("saving"), self._all_or_none():
            for model, part in self._trained(Path(folder)):
                with self._awake(model):
                    model.checkpoints.start(part, copies=async_save)
                    if not async_save:
                        model.checkpoints.wait()

    def is_written(self) -> bool:
        """Return True if the last save is on disk."""
        return all(model.checkpoints.is_written for model, _ in self._trained(Path()))

    def finish_save(self) -> dict[str, str]:
        """Wait until the last save is on disk. Return the SHA-256 of its files with tensors, by
        their names in the folder; equal on all ranks."""
        with self._named("finishing a save"), self._all_or_none():
            return {
                str(part / name): digest
                for model, part in self._trained(Path())
                for name, digest in model.checkpoints.finish().items()
            }

    @contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """Give up the saves of the other models if that of one model fails, so that no later save
        waits for them."""
        try:
            yield
        except CheckpointError:
            for model, _ in self._trained(Path()):
                model.checkpoints.give_up()
            raise

    def load(self, folder: str | Path, weights_only: bool = False) -> None:
        """Load weights, and unless `weights_only` optimizer and RNG, from a folder that `save`
        wrote under any layout."""
        with self._named("loading"):
            for model, part in self._trained(Path(folder)):
                if model is self.draft and not part.exists():
                    continue  # it did not learn yet
                if model is self.policy or not weights_only:
                    with self._awake(model):
                        model.checkpoints.load(part, weights_only=weights_only)

    def take_copy(self) -> list[int]:
        """Copy everything that a replacement rank needs to host memory, where the next copy
        replaces it. Return the bytes of its sections."""
        return self.snapshot.take()

    def read_copy(self, section: int, offset: int, size_bytes: int) -> np.ndarray:
        """Return a part of the copy; may be called while the rank is busy."""
        return self.snapshot.read(section, offset, size_bytes)

    def expect_copy(self, sizes: Sequence[list[int]]) -> None:
        """Allocate memory for a copy that this rank's predecessor took. `sizes`: [ranks][sections]
        bytes."""
        self.snapshot.allocate(sizes[self.rank])

    def write_copy(self, section: int, offset: int, part: np.ndarray) -> None:
        """Write a part of the copy."""
        self.snapshot.write(section, offset, part)

    def take_over(self) -> None:
        """Continue from the copy that was written."""
        self.snapshot.restore()

    def _awake(self, model: TrainedModel) -> AbstractContextManager[None]:
        """Keep the model on the device within the context."""
        return nullcontext() if model is self.policy else self.learner.on_device(model)

    def _trained(self, folder: Path) -> list[tuple[TrainedModel, Path]]:
        """Return (model, its part of the checkpoint) for each model that is trained."""
        trained = [
            (self.policy, folder),
            (self.critic, folder / CRITIC_PART),
            (self.draft, folder / DRAFT_PART),
        ]
        return [(model, part) for model, part in trained if model is not None]

    def start_critic(self) -> None:
        """Initialise the critic from the policy's current weights, with its own head."""
        assert self.critic is not None, "this trainer was made without a critic"
        with self.learner.on_device(self.critic):
            self.critic.copy_trunk(self.policy)

    def offload_optimizer_state(self) -> None:
        """Release the memory of gradients and optimizer; the weights can still be published. Does
        nothing on a CPU."""
        if self.device.type != "cpu":
            self.policy.sleeper.offload_optimizer_state()
            if self.policy.rounded is not None:
                self.policy.rounded.free_rounded()

    def sleep(self) -> None:
        """Move weights, gradients and optimizer to host memory. Does nothing on a CPU."""
        if self.device.type != "cpu":
            self.policy.sleeper.sleep()

    def wake(self) -> None:
        """Move what `sleep` moved back to the device. Does nothing on a CPU."""
        if self.device.type != "cpu":
            self.policy.sleeper.wake()

    def take_turn(self, adapter: str) -> None:
        """Switch to one of several adapters."""
        assert self.turns is not None, f"{adapter}: this trainer has no adapters that take turns"
        self.turns.take(adapter)
        self.learner = self.turns.learner

    def connect_engines(self, engines: list[EngineAddress], fleet: str = ROLLOUT) -> None:
        """Open the weight channel to these engines; close it if the list is empty."""
        channel = self.channels.pop(fleet, None) or self._make_channel()
        with self._named("opening the weight channel"):
            if engines:
                self.channels[fleet] = channel
                channel.open(engines)
            else:
                channel.close()

    def publish(self, version: WeightVersion, fleet: str = ROLLOUT) -> int:
        """Send the current weights to a fleet. Return the bytes that this rank sent, if its channel
        counts them."""
        with self._named(f"publishing weights {version}"):
            channel = self.channels[fleet]
            before = getattr(channel, "sent_bytes", 0)
            channel.send(self._to_send(channel))
            if self.draft is not None:  # an engine without one lets it pass
                cast("DraftChannel", channel).send_draft(self.draft.buckets())
            return getattr(channel, "sent_bytes", 0) - before

    def verify(self, fleet: str = ROLLOUT) -> None:
        """Compare the weights of the fleet's engines with the policy's. Raises MismatchError."""
        with self._named("verifying weights"):
            channel = self.channels[fleet]
            channel.verify(self._to_send(channel, for_check=True))

    def _to_send(self, channel: WeightChannel, *, for_check: bool = False) -> Any:
        """Yield shards if the channel and the model's number formats allow it, else whole
        tensors."""
        groups = getattr(channel, "groups", None)
        if groups and self.turns is None and self.recipe.weights.format == HF:
            shards = self.policy.shards_for_engines(
                groups, for_check=for_check, num_receivers=getattr(channel, "num_receivers", None)
            )
            if shards is not None:
                return shards
        return formatted(self._buckets_to_send(for_check=for_check), self.format)

    def bypass_layers(self, first: int) -> None:
        """Make layers `first` and beyond pass their input through."""
        from milescli.backends.megatron.state import weights

        weights.bypass_layers(self.policy.weights, first=first, bypassed=self._bypassed)

    def buckets(self) -> Iterator[Bucket]:
        """Yield the whole model under Hugging Face names. Collective: all ranks must consume all of
        it."""
        return self.policy.buckets()

    def _buckets_to_send(self, *, for_check: bool = False) -> Iterator[Bucket]:
        """Yield the policy's buckets, under the name of the active adapter."""
        for bucket in self.policy.buckets_for_engines(for_check=for_check):
            if self.turns is None:
                yield bucket
            else:
                yield [(engine_name(self.turns.name, name), each) for name, each in bucket]

    def parameter_checksums(self) -> dict[str, str]:
        """Return Hugging Face name -> SHA-256 of the tensor's bytes; equal weights give equal sums
        under any layout."""
        return {name: _sha256(tensor) for bucket in self.buckets() for name, tensor in bucket}

    def close(self) -> None:
        """Close the weight channels, and leave the process groups."""
        from milescli.backends.megatron import mesh

        self.drop_profile()
        for channel in getattr(self, "channels", {}).values():
            channel.close()
        mesh.tear_down()

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        """Raise WaitTimeout if a collective times out; it says which rank waited for what, and how
        long."""
        started = time.monotonic()
        try:
            with torch.profiler.record_function(f"miles: {what}"):
                yield
        except MilesError:
            raise
        except RuntimeError as error:
            if not isinstance(error, dist.DistError) and not sounds_like_lost_peer(str(error)):
                raise
            waited = time.monotonic() - started
            raise WaitTimeout(
                f"trainer rank {self.rank} lost the connection to the other ranks during {what}",
                why=f"after {waited:.0f} s (limit {self.recipe.machine.step_timeout_s:.0f} s): "
                f"{str(error).splitlines()[0]}",
                fix="look in logs/latest for the trainer rank that ended first",
            ) from error


def _sha256(tensor: torch.Tensor) -> str:
    raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(raw.numpy()).hexdigest()
