"""Defines the whole recipe. Strict (unknown keys are refused), frozen, with every default in one
place.

It knows nothing about the machine.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from milescli.recipe.data import Data
from milescli.recipe.distill import Teacher
from milescli.recipe.evaluation import Evaluation
from milescli.recipe.machine import EngineSettings, Fault, MachineSettings, Parallel, RunSettings
from milescli.recipe.model import Model
from milescli.recipe.rollout import Rollout
from milescli.recipe.section import NonNegative, Positive, PositiveFloat, Section
from milescli.recipe.train import PAIR_OBJECTIVES, REFERENCE_FREE, SCORE_OBJECTIVES, Train


class Warmup(Section):
    """Supervised steps on `data.demonstrations` before any other training; 0 steps: none."""

    steps: NonNegative = 0
    batch_size: Positive = 64
    """Number of demonstrations per step."""
    lr: PositiveFloat = 1e-3
    max_loss_tokens: Positive = 4096
    """Longest demonstration in tokens; longer ones are rejected."""


class Weights(Section):
    """How the engines receive new weights."""

    channel: str = "auto"
    """tensor: shared memory, if trainer and engines share devices; distributed: a process group
    with engines on other devices; disk: files in the run's folder; rdma: memory that engines read
    through Mooncake; store: objects in `weights.store`; auto: the plan chooses; or an import path
    to a class."""
    store: str | None = None
    """URL of an object store, such as s3://bucket/weights, through which weights travel where the
    engines reach the trainer in no other way (docs/weight-sync.md). Its credentials come from its
    own environment variables or files."""
    format: str = "hf"
    """Format of the tensors that engines receive: hf (as in a Hugging Face folder), or an import
    path."""
    bucket_mib: Positive | None = None
    """Size of one transfer of weights per rank in MiB. null: 512; on a CPU, whose caches are small,
    64."""
    full_every: Positive = 1
    """Every how many publishes all weights are sent; the others send what changed, by checksum, if
    the channel is distributed or store. 1: always all. Trainer and engines keep a copy in host
    memory."""
    wave_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Largest share of the engines that a publish pauses at a time, where they have devices of
    their own: the others sample meanwhile, with older weights. 1: all at once."""
    verify: bool = False
    """After each publish, check bit for bit that the engines hold the weights that the trainer
    sent."""

    @property
    def named_channel(self) -> str:
        """Return the channel that the recipe names; `auto` if the plan chooses."""
        return "store" if self.channel == "auto" and self.store is not None else self.channel


class Checkpoint(Section):
    """Which checkpoints to write and keep."""

    every: NonNegative = 20
    """Steps between checkpoints; 0: only at the end. A stopped run always saves one."""
    keep: Positive = 2
    """Number of newest checkpoints to keep."""
    async_save: bool = True
    """Write checkpoints in the background while training continues."""
    mirror: str | None = None
    """URL of an object store, such as s3://bucket/runs, to which each checkpoint is copied in the
    background, in a folder with the run's name (docs/checkpoints.md); null: none. Credentials come
    from the store's own environment variables or files."""


class Recipe(Section):
    """The whole recipe."""

    name: str = "unnamed"
    description: str = ""
    model: Model = Model()
    data: Data = Data()
    rollout: Rollout = Rollout()
    train: Train = Train()
    warmup: Warmup = Warmup()
    weights: Weights = Weights()
    parallel: Parallel = Parallel()
    engines: EngineSettings = EngineSettings()
    eval: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    machine: MachineSettings = MachineSettings()
    fault: Fault = Fault()
    run: RunSettings = RunSettings()
    adapters: dict[str, dict[str, Any]] = Field(default={})
    """Several adapters over one model, trained and served at once: {sums: {data: {prompts:
    a.jsonl}}, words: {train: {steps: 80}}}. Each has a name and the settings that differ from this
    recipe: keys of data, rollout, train, eval, checkpoint, warmup, model.adapter and run.seed."""

    @property
    def learns_from_rows(self) -> bool:
        """Return True if the run learns from the rows of `data.train`, False if it learns from
        samples."""
        return self.data.train is not None

    @property
    def has_engines(self) -> bool:
        """Return True if anything is sampled, to train on or to evaluate."""
        return not self.learns_from_rows or self.data.eval is not None

    @property
    def longest_sequence(self) -> int:
        """Return the length in tokens of the longest sequence that is trained on."""
        if self.learns_from_rows:
            return self.data.max_row_tokens + self.trains_scores
        return self.data.max_prompt_tokens + self.rollout.max_response_tokens

    @property
    def trains_scores(self) -> bool:
        """Return True if the model gives a score instead of a next token."""
        return self.train.objective in SCORE_OBJECTIVES

    @property
    def has_mtp(self) -> bool:
        """Return True if the model's MTP layer is trained or used for speculation."""
        return self.rollout.speculative.kind == "mtp" or self.train.mtp.is_on

    @property
    def has_critic(self) -> bool:
        """Return True if a critic is trained too."""
        return self.train.credit == "gae" and not self.learns_from_rows

    @property
    def teachers(self) -> list[Teacher]:
        """Return the teachers of `train.distill`."""
        return self.train.distill.teachers

    @property
    def local_teachers(self) -> list[Teacher]:
        """Return the teachers that the trainer's ranks hold."""
        return [teacher for teacher in self.teachers if teacher.url is None]

    @property
    def caches_teacher(self) -> bool:
        """Return True if the teachers' log-probs of the rows are computed once and stored."""
        return self.train.objective == "distillation" and self.train.distill.cache

    @property
    def reward_names(self) -> list[str]:
        """Return the names of all rewards, including those of roles and of sources of the mix."""
        sources = [] if self.rollout.is_scored_by_agent else self.data.mix or []
        own = [source.reward for source in sources if source.reward is not None]
        return [*self.rollout.reward_names, *own]

    @property
    def uses_reward_model(self) -> bool:
        """Return True if the reward `reward_model` scores samples."""
        return "reward_model" in self.reward_names

    @property
    def runs_code(self) -> bool:
        """Return True if code of the model runs on this machine."""
        is_required = "code" in self.reward_names or "python" in self.rollout.tools
        return is_required and not self.rollout.code.url

    @property
    def engines_apart(self) -> int:
        """Return how many of the plan's engines sample nothing to train on (`plan.placement`)."""
        return int(self.eval.engines == "own") + len(self.rollout.policies)

    @property
    def sequences_per_row(self) -> int:
        """Return the number of sequences per row: 2 for a chosen and a rejected response."""
        return 2 if self.train.objective in PAIR_OBJECTIVES else 1

    @property
    def sequences_per_step(self) -> int:
        """Return the number of sequences that a step trains on."""
        if self.learns_from_rows:
            return self.train.batch_size * self.sequences_per_row
        return self.rollout.prompts_per_step * self.rollout.samples_per_prompt

    @property
    def old_logprobs(self) -> Literal["trainer", "engine"]:
        """Return which side computes the old policy's log-probs, with `train.old_logprobs: auto`
        resolved: stale samples came from older weights, and only the engine knows their
        log-probs."""
        if self.train.old_logprobs != "auto":
            return self.train.old_logprobs
        return "engine" if self.rollout.max_staleness else "trainer"

    @property
    def keeps_reference(self) -> bool:
        """Return True if the weights before RL are kept, with `train.reference` resolved."""
        if self.train.reference is not None:
            return self.train.reference
        return self.train.kl_coef > 0 or self.scores_reference

    @property
    def scores_reference(self) -> bool:
        """Return True if the objective is a preference loss for which these weights score the rows
        of each step."""
        return self._compares and not self.caches_reference

    @property
    def caches_reference(self) -> bool:
        """Return True if log-probs of the rows under the initial weights are computed once and
        stored, so that these weights need not be kept."""
        settings = self.train.preference
        return self._compares and settings.reference == "cached" and settings.loss != "kto"

    @property
    def _compares(self) -> bool:
        """Return True if the objective is a preference loss that needs a reference."""
        return (
            self.train.objective == "preference"
            and self.train.preference.loss not in REFERENCE_FREE
        )

    @property
    def joins_rows(self) -> bool:
        """Return True if a step compares each row with another one of it: KTO estimates its KL on
        the prompt of one and the response of the other."""
        return self.train.objective == "preference" and self.train.preference.loss == "kto"

    def reference_step(self, step: int) -> int:
        """Return the step after which the weights became the reference that is used after
        `step`."""
        every = self.train.reference_every
        return step // every * every if every else 0
