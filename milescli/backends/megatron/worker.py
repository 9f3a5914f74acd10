"""One trainer rank: model, optimizer and weight channel of this process. Methods are called by name
on all ranks at once, with equal arguments but for the shard, which is that of the rank's data-
parallel rank; each returns plain data. It knows nothing of who hosts the process."""

from __future__ import annotations

import hashlib
import importlib
import logging
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from milescli.core.errors import MilesError, WaitTimeout
from milescli.core.lost_peer import sounds_like_lost_peer
from milescli.core.types import EngineAddress, StepReport, WeightVersion
from milescli.models import load_facts, table
from milescli.plan.legal import check_layout
from milescli.plan.types import Plan
from milescli.recipe.schema import Recipe
from milescli.train.base import Objective, TrainShard
from milescli.train.objectives import OBJECTIVES, load_objective
from milescli.train.rank_hooks import load_before_log_probs
from milescli.train.streams import FROM_RANKS, Stream
from milescli.weights.base import Bucket, WeightChannel
from milescli.weights.formats import formatted, load_format

if TYPE_CHECKING:
    from milescli.backends.megatron.shard import RankShard

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
        self._objectives: dict[str, Objective[Any]] = {}
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
            from milescli.backends.megatron.layers.attention import avoid_cudnn

            torch.cuda.set_device(self.device)
            avoid_cudnn()
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
        self.format = load_format(self.recipe.weights.format)
        self.before_log_probs = load_before_log_probs(self.recipe.train.before_log_probs)
        return {"join_s": joined - started, "build_s": time.monotonic() - joined}

    def _build(self) -> None:
        from milescli.backends.megatron import model, optimizer, replay, weights
        from milescli.backends.megatron.checkpoint import CheckpointIO
        from milescli.backends.megatron.forward import Passes
        from milescli.backends.megatron.layer_specs import load_layer_spec
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
        change = load_layer_spec(self.recipe.model.layer_spec)
        gpt = model.build_model(config, self.facts, self.mesh, change_layer=change)
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
            gives_scores=self.facts.scores,
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
            timeout_s=self.recipe.machine.request_timeout_s,
        )

    def step(self, shard: TrainShard, lr: float) -> StepReport:
        """One optimizer update per entry of `shard.updates`. Equal on all ranks. Raises
        NotFiniteError before an update that would spoil the weights; updates before it in the same
        step stand."""
        from milescli.backends.megatron import optimizer, stepping

        objective = self._objective(shard.objective)
        with self._named("an optimizer step"):
            own, seconds = self._on_rank(shard), _Stopwatch()
            self._fill(own, objective)
            optimizer.set_lr(self.optimizer, lr)
            figures = []
            for number, microbatches in enumerate(own.updates):
                loss = stepping.UpdateLoss(
                    objective=objective,
                    shard=own,
                    mesh=self.mesh,
                    measures_engine=number == 0 or Stream.OLD in own,
                )
                self.model.zero_grad_buffer()
                self.optimizer.zero_grad()
                self.passes.train(microbatches, loss, temperature=shard.temperature)
                loss.require_finite()
                optimizer.require_finite_gradients(self.model, device=self.device)
                seconds.lap("forward_backward_s")
                _, grad_norm, _ = self.optimizer.step()
                seconds.lap("optimizer_s")
                figures.append(stepping.reduce_figures(loss, grad_norm=float(grad_norm)))
            return stepping.report(
                figures, lr=lr, num_microbatches=len(own.microbatches), **seconds.laps
            )

    def measure(self, shard: TrainShard) -> StepReport:
        """Loss and figures of the shard's batch as `step` would report them; nothing changes. Equal
        on all ranks."""
        from milescli.backends.megatron import stepping

        objective = self._objective(shard.objective)
        with self._named("measuring a loss"):
            own, seconds = self._on_rank(shard), _Stopwatch()
            self._fill(own, objective)
            figures = []
            for microbatches in own.updates:
                loss = stepping.UpdateLoss(
                    objective=objective, shard=own, mesh=self.mesh, measures_engine=False
                )
                self.passes.measure(microbatches, loss, temperature=shard.temperature)
                loss.require_finite()
                figures.append(stepping.reduce_figures(loss, grad_norm=0.0))
            seconds.lap("forward_backward_s")
            return stepping.report(
                figures, lr=0.0, num_microbatches=len(own.microbatches), **seconds.laps
            )

    def _fill(self, own: RankShard, objective: Objective[Any]) -> None:
        """The streams that the objective needs, then those that it makes of them."""
        for stream in FROM_RANKS:
            if stream in objective.needs:
                with self._weights_of(stream):
                    own.fill(stream, self._score(own, stream))
        if self.mesh.is_last_stage:
            tokens = own.all_tokens()
            with OBJECTIVES.guarded(own.shard.objective):
                objective.complete(tokens)
            own.keep(tokens)

    def _weights_of(self, stream: Stream) -> AbstractContextManager[None]:
        """The model that makes a stream is in the policy's place within."""
        return self.reference.swapped_in() if stream is Stream.REFERENCE else nullcontext()

    def score(self, shard: TrainShard) -> list[np.ndarray] | None:
        """Per sequence of the shard, [n] float32 log-prob of each token given those before it; 0.0
        for the first. None on ranks that do not speak for its tokens."""
        with self._named("scoring samples"):
            own = self._on_rank(shard)
            own.fill(Stream.OLD, self._score(own, Stream.OLD))
            if not self.mesh.speaks_for_tokens:
                return None
            sequences = own.by_sequence(Stream.OLD)
            if self.mesh.layout.cp > 1:
                whole = torch.cat(sequences).to(self.device)
                dist.all_reduce(whole, group=self.mesh.cp_group)
                sequences = list(whole.cpu().split([len(values) for values in sequences]))
            return None if self.mesh.cp_rank else [values.numpy() for values in sequences]

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
        """Send the current weights."""
        assert self.channel is not None, "this trainer was made without a weight channel"
        with self._named(f"publishing weights {version}"):
            self.channel.send(formatted(self.buckets(), self.format))

    def verify(self) -> None:
        """Compare what the engines hold with the current weights. Raises MismatchError."""
        assert self.channel is not None, "this trainer was made without a weight channel"
        with self._named("verifying weights"):
            self.channel.verify(formatted(self.buckets(), self.format))

    def silence_layers(self, first: int) -> None:
        """Make layers `first` and beyond pass their input through. For finding out where engine and
        trainer part; the weights are lost."""
        from milescli.backends.megatron import weights

        weights.silence_layers(self.weights, first=first)

    def buckets(self) -> Iterator[Bucket]:
        """The whole model under Hugging Face names. Collective: all ranks consume all of it."""
        from milescli.backends.megatron.gathering import hf_buckets

        size = self.recipe.weights.bucket_mib * _MIB
        return hf_buckets(self.weights, self.table, mesh=self.mesh, bucket_bytes=size)

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

    def _objective(self, name: str) -> Objective[Any]:
        """Made once."""
        if name not in self._objectives:
            self._objectives[name] = load_objective(name, self.recipe)
        return self._objectives[name]

    def _on_rank(self, shard: TrainShard) -> RankShard:
        from milescli.backends.megatron.shard import RankShard

        return RankShard(shard, mesh=self.mesh, facts=self.facts)

    def _score(self, own: RankShard, stream: Stream) -> list[torch.Tensor]:
        """[S] log-probs for each microbatch, on ranks of the last stage."""
        if self.before_log_probs is not None:
            with torch.no_grad():
                self.before_log_probs(model=self.model.module, stream=str(stream))
        return self.passes.score(own.microbatches, temperature=own.shard.temperature)

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
            if not isinstance(error, dist.DistError) and not sounds_like_lost_peer(str(error)):
                raise
            waited = time.monotonic() - started
            raise WaitTimeout(
                f"trainer rank {self.rank} lost the other ranks during {what}",
                why=f"after {waited:.0f} s (bound {self.recipe.machine.step_timeout_s:.0f} s): "
                f"{str(error).splitlines()[0]}",
                fix="look into logs/latest for the trainer rank that ended first",
            ) from error


class _Stopwatch:
    """Seconds of the parts of a step."""

    def __init__(self) -> None:
        self.laps = {"forward_backward_s": 0.0, "optimizer_s": 0.0}
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        """What has passed since the last lap belongs to `name`."""
        now = time.monotonic()
        self.laps[name] += now - self._last
        self._last = now


def _sha256(tensor: torch.Tensor) -> str:
    raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(raw.numpy()).hexdigest()


def _quieten() -> None:
    """Megatron announces every layer and buffer at level INFO and warns of what this room has
    chosen on purpose."""
    logging.getLogger("megatron").setLevel(logging.ERROR)
