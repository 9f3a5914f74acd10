"""One trainer rank: model, optimizer and weight channel of this process. Methods are called by name
on all ranks at once, with equal arguments; each returns plain data. It knows nothing of who hosts
the process."""

from __future__ import annotations

import hashlib
import importlib
import logging
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist

from milescli.core.errors import MilesError, WaitTimeout
from milescli.core.types import StepReport, WeightVersion
from milescli.models import load_facts, table
from milescli.plan.legal import check_layout
from milescli.plan.types import Plan
from milescli.recipe.schema import Recipe
from milescli.train.base import TrainBatch
from milescli.train.losses import PolicyLoss
from milescli.weights.base import Bucket, EngineAddress, WeightChannel

_MIB = 2**20


class TrainerRank:
    """See the module. `setup` first, `close` last."""

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
    ) -> None:
        """`model_dir`: Hugging Face folder. `channel`: import path `module:Class` of the weight
        channel, or None where nothing is published. Takes no device and opens nothing."""
        assert world_size == plan.trainer.world_size, (world_size, plan.trainer)
        self.rank = rank
        self.master = (master_addr, master_port)
        self.recipe, self.plan = recipe, plan
        self.model_dir = Path(model_dir)
        self.channel_path = channel
        self.dtype = torch.bfloat16 if plan.precision == "bf16" else torch.float32

    def setup(self) -> dict[str, float]:
        """Join the other ranks, build the model, load its weights, make the optimizer. Returns
        seconds per part.

        Raises FitError, CheckpointError, or WaitTimeout where the ranks do not meet.
        """
        started = time.monotonic()
        from milescli.backends.megatron import cpu_compat

        on_host = cpu_compat.install()
        self.device = torch.device("cpu") if on_host else torch.device("cuda", 0)
        if on_host:
            torch.set_num_threads(self.plan.cpu_threads)
        else:
            torch.cuda.set_device(self.device)
        _quieten()
        self.facts = load_facts(self.model_dir)
        self.table = table(self.facts)
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
        self.channel = self._make_channel()
        return {"join_s": joined - started, "build_s": time.monotonic() - joined}

    def _build(self) -> None:
        from milescli.backends.megatron import model, optimizer, replay, weights
        from milescli.backends.megatron.checkpoint import CheckpointIO
        from milescli.backends.megatron.forward import Passes
        from milescli.backends.megatron.reference import Reference
        from milescli.backends.megatron.sleeping import Sleeper

        config = model.build_config(
            self.facts,
            self.plan.trainer,
            dtype=self.dtype,
            device=self.device,
            recompute=self.plan.trainer.recompute,
            routing_replay=self.recipe.train.routing_replay,
        )
        gpt = model.build_model(config, self.facts, self.mesh)
        self.weights = weights.local_weights(gpt, self.table, self.mesh)
        weights.load_hf(self.weights, self.table, folder=self.model_dir, mesh=self.mesh)
        self.model = optimizer.wrap(gpt)
        self.optimizer = optimizer.make_optimizer(
            self.model,
            self.recipe.train.optimizer,
            dtype=self.dtype,
            on_host=self.plan.trainer.offload_optimizer,
        )
        self.reference = Reference(self.model)
        self.sleeper = Sleeper(self.model, self.optimizer)
        self.checkpoints = CheckpointIO(
            self.model, self.optimizer, timeout_s=self.recipe.machine.step_timeout_s
        )
        self.passes = Passes(
            model=self.model,
            mesh=self.mesh,
            vocab_size=self.facts.vocab_size,
            routers=replay.own_routers(gpt),
        )

    def _make_channel(self) -> WeightChannel | None:
        if self.channel_path is None:
            return None
        module, _, name = self.channel_path.partition(":")
        build = getattr(importlib.import_module(module), name)
        return build(
            backend=self.plan.collective,
            host=self.master[0],
            timeout_s=self.recipe.machine.step_timeout_s,
        )

    def step(self, batch: TrainBatch, lr: float) -> StepReport:
        """One optimizer update per entry of `batch.updates`. Equal on all ranks. Raises
        NotFiniteError before an update that would spoil the weights; updates before it in the same
        batch stand."""
        from milescli.backends.megatron import optimizer, stepping

        with self._named("an optimizer step"):
            own = self._microbatches(batch)
            passes_s, optimizer_s = -time.monotonic(), 0.0
            reference = self._reference_logprobs(batch, own)
            from_engine = self.plan.old_logprobs == "engine"
            old = None if from_engine or len(own) == 1 else self._score(batch, own)
            optimizer.set_lr(self.optimizer, lr)
            figures = []
            for microbatches in own:
                loss = stepping.StepLoss(
                    kind=batch.kind,
                    rule=self._policy_loss(),
                    mesh=self.mesh,
                    old_from_engine=from_engine,
                    old_logprobs=old,
                    reference_logprobs=reference,
                )
                self.model.zero_grad_buffer()
                self.optimizer.zero_grad()
                self.passes.train(microbatches, loss, temperature=batch.temperature)
                loss.require_finite(batch)
                optimizer.require_finite_gradients(self.model, device=self.device)
                passes_s += time.monotonic()
                optimizer_s -= time.monotonic()
                _, grad_norm, _ = self.optimizer.step()
                optimizer_s += time.monotonic()
                passes_s -= time.monotonic()
                figures.append(
                    stepping.reduce_figures(loss, grad_norm=float(grad_norm), mesh=self.mesh)
                )
            passes_s += time.monotonic()
            return stepping.report(
                figures,
                lr=lr,
                num_microbatches=sum(len(microbatches) for microbatches in own),
                forward_backward_s=passes_s,
                optimizer_s=optimizer_s,
            )

    def logprobs(self, batch: TrainBatch) -> list[array[float]]:
        """Per sequence, [positions] log-prob of each target at `batch.temperature`. Rank 0 returns
        them, the others nothing."""
        with self._named("scoring answers"):
            scores = self._score(batch, self._microbatches(batch))
            if not self.mesh.speaks_for_tokens:
                scores.zero_()
            whole = scores.to(self.device)
            dist.all_reduce(whole)
            if self.rank != 0:
                return []
            values = whole.cpu().numpy()
            return [
                array("f", values[start:end].tobytes()) for start, end in pairwise(batch.cu_seqlens)
            ]

    def freeze_reference(self) -> None:
        """The current weights become the reference of the KL term, kept in host memory."""
        self.reference.freeze()

    def reset_optimizer(self) -> None:
        """Forget the moments."""
        from milescli.backends.megatron import optimizer

        optimizer.forget_moments(self.optimizer)

    def save(self, folder: str, async_save: bool) -> None:
        """Write weights, optimizer and RNG into `folder`, which is made. With `async_save`,
        training may go on at once and the files are complete after `finish_save`."""
        with self._named("saving"):
            self.checkpoints.start(Path(folder))
            if not async_save:
                self.checkpoints.finish()

    def finish_save(self) -> None:
        """Wait until the last save is on disk."""
        with self._named("finishing a save"):
            self.checkpoints.finish()

    def load(self, folder: str, weights_only: bool = False) -> None:
        """Take weights, and unless `weights_only` optimizer and RNG, from a folder that `save`
        wrote under any layout."""
        with self._named("loading"):
            self.checkpoints.load(Path(folder), weights_only=weights_only)

    def shed(self) -> None:
        """Give the memory of gradients and optimizer back; the weights can be published. On a CPU:
        nothing."""
        if self.device.type != "cpu":
            self.sleeper.shed()

    def sleep(self) -> None:
        """Move weights, gradients and optimizer to host memory, so that a colocated engine may use
        the device. On a CPU: nothing."""
        if self.device.type != "cpu":
            self.sleeper.sleep()

    def wake(self) -> None:
        """Bring them back. On a CPU: nothing."""
        if self.device.type != "cpu":
            self.sleeper.wake()

    def connect_engines(self, engines: list[EngineAddress]) -> None:
        """Open the weight channel to these engines; again after one was replaced."""
        assert self.channel is not None, "this trainer was made without a weight channel"
        with self._named("opening the weight channel"):
            self.channel.open(engines)

    def publish(self, version: WeightVersion) -> None:
        """Send the current weights; the engines hold them as `version` afterwards."""
        assert self.channel is not None, "this trainer was made without a weight channel"
        with self._named(f"publishing weights {version}"):
            self.channel.send(self.buckets(), version)

    def verify(self) -> None:
        """Compare what the engines hold with the current weights. Raises MismatchError."""
        assert self.channel is not None, "this trainer was made without a weight channel"
        with self._named("verifying weights"):
            self.channel.verify(self.buckets())

    def silence_layers(self, first: int) -> None:
        """Make layers `first` and beyond pass their input through. For finding out where engine and
        trainer part; the weights are lost."""
        from milescli.backends.megatron import weights

        weights.silence_layers(self.weights, first=first)

    def buckets(self) -> Iterator[Bucket]:
        """The whole model under Hugging Face names. Collective: all ranks consume all of it."""
        from milescli.backends.megatron import weights

        size = self.recipe.weights.bucket_mib * _MIB
        return weights.hf_buckets(self.weights, self.table, mesh=self.mesh, bucket_bytes=size)

    def parameter_checksums(self) -> dict[str, str]:
        """Hugging Face name -> SHA-256 of the tensor's bytes; equal for equal weights under any
        layout."""
        return {name: _sha256(tensor) for bucket in self.buckets() for name, tensor in bucket}

    def close(self) -> None:
        """Give channel and groups back."""
        from milescli.backends.megatron import mesh

        if getattr(self, "channel", None) is not None:
            self.channel.close()
        mesh.tear_down()

    def _microbatches(self, batch: TrainBatch):
        """[updates][microbatches] of this rank."""
        from milescli.backends.megatron.microbatch import make_microbatch

        return [
            [
                make_microbatch(batch, indices, mesh=self.mesh, facts=self.facts)
                for indices in update[self.mesh.dp_rank]
            ]
            for update in batch.updates
        ]

    def _score(self, batch: TrainBatch, own) -> torch.Tensor:
        """[T] float32 on the host: this rank's positions filled where it is on the last stage, 0
        elsewhere."""
        scores = torch.zeros(batch.cu_seqlens[-1], dtype=torch.float32)
        microbatches = [microbatch for update in own for microbatch in update]
        for microbatch, logprobs in zip(
            microbatches,
            self.passes.score(microbatches, temperature=batch.temperature),
            strict=False,
        ):
            real = microbatch.source >= 0
            scores[microbatch.source[real]] = logprobs.cpu()[real]
        return scores

    def _reference_logprobs(self, batch: TrainBatch, own) -> torch.Tensor | None:
        from milescli.train.base import LossKind

        if batch.kind is not LossKind.POLICY or not self.recipe.train.kl_coef:
            return None
        with self.reference.swapped_in():
            return self._score(batch, own)

    def _policy_loss(self) -> PolicyLoss:
        train = self.recipe.train
        return PolicyLoss(
            clip_low=train.clip_low,
            clip_high=train.clip_high,
            kl_coef=train.kl_coef,
            kl_estimator=train.kl_estimator,
            entropy_coef=train.entropy_coef,
        )

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        """A collective that gives up says so in torch's words: say who waited, for what, and how
        long."""
        started = time.monotonic()
        try:
            yield
        except MilesError:
            raise
        except RuntimeError as error:
            if not _is_lost_peer(error):
                raise
            waited = time.monotonic() - started
            raise WaitTimeout(
                f"trainer rank {self.rank} lost the other ranks during {what}",
                why=f"after {waited:.0f} s (bound {self.recipe.machine.step_timeout_s:.0f} s): "
                f"{str(error).splitlines()[0]}",
                fix="look into logs/latest for the trainer rank that ended first",
            ) from error


def _is_lost_peer(error: RuntimeError) -> bool:
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(
        word in text
        for word in ("timed out", "timeout", "connection closed", "connection reset", "broken pipe")
    )


def _sha256(tensor: torch.Tensor) -> str:
    raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(raw.numpy()).hexdigest()


def _quieten() -> None:
    """Megatron announces every layer and buffer at level INFO and warns of what this room has
    chosen on purpose."""
    logging.getLogger("megatron").setLevel(logging.ERROR)
