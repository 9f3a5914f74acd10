"""Finds the models of a run besides its policy, before any process starts: teachers, a reward
model, a draft model, policies of roles, an adapter. Each is found, downloaded, or written from a
run's checkpoint, and its tokenizer is compared with the policy's. Called by `run_inputs`,
`planning` and `evaluate`."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milescli.backends.hub.models import fetch_config, fetch_model
from milescli.backends.stores.store import StoreUrl
from milescli.checkpoint.base import is_converted
from milescli.checkpoint.run_dir import CHECKPOINTS, RECIPE_FILE, RunDir
from milescli.conversion.source import CheckpointSource, find_checkpoint
from milescli.core.errors import FitError, MachineError, RecipeError
from milescli.data.chat_template import RAW
from milescli.data.tokenizer import ChatTokenizer, load_tokenizer
from milescli.export.peft import AdapterOutline, read_outline
from milescli.models import ModelFacts, load_facts, parse_facts, table
from milescli.models.adapter import adapter_table, pairs_of, shared_matrices
from milescli.models.base import CONFIG_NAME, WeightTable, read_config
from milescli.plan.legal import check_layout
from milescli.plan.memory import trained_shape
from milescli.plan.on_cpu import longest_tokens
from milescli.plan.types import Plan
from milescli.recipe.machine import RunSettings
from milescli.recipe.schema import Recipe
from milescli.recipe.store_url import NO_STORE
from milescli.recipe.templates import shipped_shape, template_names

if TYPE_CHECKING:
    from milescli.backends.sglang.client.teacher import ServedTeachers
    from milescli.console.output import Output


NUM_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class AuxiliaryModel:
    """Describes the location of such a model, as the recipe names it."""

    what: str
    """Name for errors: `teacher`, `reward model`."""
    key: str
    """Recipe key that names it."""
    path: str
    revision: str | None = None
    step: int | None = None
    """Step of a run's checkpoint; None: the newest."""

    def facts(self, longest: int) -> ModelFacts:
        """Return the model's facts, without making or loading it. `longest`: number of tokens of a
        sequence that it will read. Raises RecipeError if it does not exist or has too few
        positions, CheckpointError if it is not a model."""
        facts = parse_facts(self.config())
        if 0 < facts.max_position_embeddings < longest:
            raise RecipeError(
                f"the {self.what} {self.path} cannot read the longest sequence",
                why=f"prompt and response may have {longest} tokens together, but it has only "
                f"{facts.max_position_embeddings} positions",
                fix=f"name a {self.what} with more positions in {self.key}, or shorten prompts "
                "or responses",
            )
        return facts

    def config(self) -> dict[str, object]:
        """Return the model's config.json, without making or loading the model. Raises as
        `facts`."""
        folder = self._require()
        if is_checkpoint(folder):
            return read_config(checkpoint_of(folder, self.step).model_dir)
        if folder.is_dir():
            return read_config(folder)
        if self.revision in (None, "main") and (shape := shipped_shape(self.path)):
            return shape
        return read_config(fetch_config(self.path, revision=self.revision, instead=self._copy))

    def folder(self, target: Path, *, output: Output | None) -> Path:
        """Return the model's Hugging Face folder; a run's checkpoint is written to `target`, once:
        the model stays the same even if the other run continues."""
        folder = self._require()
        if is_checkpoint(folder):
            if not (target / CONFIG_NAME).exists():
                from milescli.conversion.unpack import unpack

                checkpoint = checkpoint_of(folder, self.step)
                model_dir = checkpoint.model_dir
                unpack(checkpoint.tensors, target, model_dir=model_dir, output=output)
            return target.absolute()
        if folder.is_dir():
            return folder.absolute()
        return fetch_model(self.path, revision=self.revision, output=output, instead=self._copy)

    def refuse_other_tokens(
        self, folder: Path, *, tokenizer: ChatTokenizer, least: int
    ) -> ChatTokenizer:
        """Return the model's tokenizer. `tokenizer`: the policy's; `least`: least number of rows of
        its embedding. Raises RecipeError, naming the difference, if the two tokenizers do not give
        each text the same ids."""
        theirs = load_tokenizer(folder, chat_template=RAW)
        difference, num_tokens = _difference(tokenizer, theirs), load_facts(folder).vocab_size
        if difference is None and num_tokens < least:
            difference = f"it has {num_tokens:,} tokens, and the policy has {least:,}"
        if difference is not None:
            raise RecipeError(
                f"the {self.what} {self.path} has another tokenizer than the policy",
                why=f"{difference}; the same token id would mean another text",
                fix=[
                    f"name a model of the policy's family in {self.key}",
                    f"--set model.scratch=null --set model.path={shlex.quote(self.path)}   # use a "
                    "policy with its tokenizer",
                ],
            )
        return theirs

    @property
    def is_on_hub(self) -> bool:
        """Return True if the path looks like a name on the hub, and cannot be a local folder."""
        folder = Path(self.path).expanduser()
        is_local = folder.is_absolute() or folder.parent.is_dir() or is_run_path(self.path)
        return self.path.count("/") == 1 and not is_local

    @property
    def _copy(self) -> str:
        return f"name the folder of a copy in {self.key}"

    def _require(self) -> Path:
        """Return the path. Raises RecipeError if it is neither a folder nor a name on the hub."""
        folder = Path(self.path).expanduser()
        if not folder.is_dir() and not self.is_on_hub:
            raise RecipeError(
                f"the {self.what} {self.path} does not exist",
                why=f"`{self.key}` must name a Hugging Face folder, a model on the hub or a run",
                fix=[
                    launch_that_makes(folder)
                    or f"miles export RUN --to {shlex.quote(str(folder))}",
                    f"name another model in {self.key}",
                ],
            )
        return folder


def is_run_path(path: str) -> bool:
    """Return True if the path lies in the usual folder of runs: it is no name on the hub, even if
    there is no run yet."""
    parts = Path(path).parts
    return len(parts) > 1 and parts[0] == RunSettings().dir


def launch_that_makes(folder: Path) -> str | None:
    """Return the command that makes a missing run of a built-in recipe, whose default name is the
    recipe's and a number; None for other folders."""
    of_run = re.fullmatch(r"(.+)-\d+", folder.name)
    if folder.parent.name == RunSettings().dir and of_run and of_run[1] in template_names():
        return f"miles launch --recipe {of_run[1]} --name {folder.name}"
    return None


def is_checkpoint(folder: Path) -> bool:
    """Return True if the folder is a run, one of its checkpoints or a converted model, which is not
    yet a Hugging Face folder."""
    run = folder.parent.parent if folder.parent.name == CHECKPOINTS else folder
    return (run / RECIPE_FILE).is_file() or is_converted(folder)


def checkpoint_of(folder: Path, step: int | None = None) -> CheckpointSource:
    """Return the checkpoint in such a folder; for a run the newest, unless `step` is given. Raises
    CheckpointError."""
    return find_checkpoint(folder, model=None, step=step, model_option="--base")


def _difference(own: ChatTokenizer, theirs: ChatTokenizer) -> str | None:
    """Describe how two vocabularies differ; None if both give each text the same ids, as far as the
    vocabularies show."""
    ours, other = own.inner.get_vocab(), theirs.inner.get_vocab()
    different = sorted((token for token in ours if ours[token] != other.get(token)), key=ours.get)
    different += sorted((token for token in other if token not in ours), key=other.get)
    if not different:
        return None
    shown = ", ".join(
        f"{token!r} is {_named(ours.get(token))} for the policy, but {_named(other.get(token))} "
        "there"
        for token in different[:NUM_SHOWN]
    )
    return f"{len(different):,} of {len(ours.keys() | other.keys()):,} tokens differ: {shown}"


def _named(number: int | None) -> str:
    return "missing" if number is None else f"id {number}"


def draft_path(recipe: Recipe) -> AuxiliaryModel | None:
    """Return the location of the draft model; None if no separate model is used for speculation."""
    settings = recipe.rollout.speculative
    if settings.kind != "draft":
        return None
    assert settings.model is not None, "recipe.check lets no draft without a model pass"
    return AuxiliaryModel(
        what="draft model",
        key="rollout.speculative.model",
        path=settings.model,
        revision=settings.revision,
    )


def require_draft(recipe: Recipe) -> ModelFacts | None:
    """Return the draft model's facts, without loading it. Raises RecipeError if it does not exist
    or cannot read the longest sequence, CheckpointError if it is not a model."""
    path = draft_path(recipe)
    return None if path is None else path.facts(longest_tokens(recipe))


def weights_place(recipe: Recipe, run: RunDir) -> str | StoreUrl:
    """Return the folder or the store in which a run puts weights that its engines read."""
    if recipe.weights.store is not None:
        url = f"{recipe.weights.store.rstrip('/')}/{run.name}/weights"
        return StoreUrl(url, instead=NO_STORE)
    return str(run.path.absolute() / "weights")


def require_weight_store(recipe: Recipe, run: RunDir) -> None:
    """Write an object to `weights.store`, if it is set, read it as an engine rank does, and remove
    it. Call it on the main thread before processes start. Raises StoreError."""
    place = weights_place(recipe, run)
    if isinstance(place, str):
        return
    from milescli.backends.sglang.inside.links import read_links

    store = place.open()
    store.write("probe", b"miles")
    link = store.link("probe", expires_s=60)
    try:
        read_links([(link, 0, 5)], size_bytes=5)
    except OSError as error:
        raise MachineError(
            f"{store.url} gives no links that engines can read",
            why=str(error),
            fix=NO_STORE,
        ) from None
    store.remove(["probe"])


def require_channel(plan: Plan) -> None:
    """Raise MachineError if the package that the channel needs is not installed."""
    if plan.channel == "rdma" and find_spec("mooncake") is None:
        raise MachineError(
            "weights cannot be sent over RDMA",
            why="Mooncake's transfer engine is not installed",
            fix=["pip install 'miles-cli[rdma]'", "--set weights.channel=auto"],
        )


def require_learning_draft(plan: Plan, facts: ModelFacts) -> None:
    """Raise MachineError, CheckpointError or FitError if a draft model with these facts cannot be
    trained beside the policy."""
    off = "--set train.draft.lr=null"
    if plan.device_kind != "cpu":
        raise MachineError(
            f"a draft model cannot be trained on {plan.device_kind}",
            why="the plan does not reserve memory for it next to policy and engines there",
            fix=off,
        )
    if plan.channel != "tensor":
        raise FitError(
            "the trained draft model would not reach the engines",
            why=f"the channel is {plan.channel}, because they use other devices than the trainer",
            fix=["--set engines.placement=colocated", off],
        )
    try:
        check_layout(plan.trainer, facts)
    except FitError as error:
        raise FitError(
            "the draft model cannot be trained under the policy's layout",
            why=f"{error.what}: {error.why}",
            fix=off,
        ) from None


def draft_folder(
    recipe: Recipe,
    run: RunDir,
    *,
    tokenizer: ChatTokenizer,
    facts: ModelFacts,
    output: Output | None,
) -> Path | None:
    """Return the draft model's Hugging Face folder. Raises as `require_draft`, and RecipeError if
    it has other tokens than the policy, whose `facts` these are."""
    path = draft_path(recipe)
    if path is None:
        return None
    folder = path.folder(run.queried_model_dir("draft-model", path.path), output=output)
    path.refuse_other_tokens(folder, tokenizer=tokenizer, least=facts.vocab_size)
    return folder


def without_speculation(recipe: Recipe) -> Recipe:
    """Return the recipe without speculative decoding, for engines that load folders: SGLang cannot
    do both."""
    plain = recipe.rollout.speculative.model_copy(
        update={"kind": "none", "model": None, "revision": None}
    )
    return recipe.model_copy(
        update={"rollout": recipe.rollout.model_copy(update={"speculative": plain})}
    )


def reward_path(recipe: Recipe) -> AuxiliaryModel | None:
    """Return the location of the reward model; None if the recipe uses none."""
    if not recipe.uses_reward_model:
        return None
    settings = recipe.rollout.reward_model
    assert settings.path is not None, "recipe.check lets no reward model without a path pass"
    return AuxiliaryModel(
        what="reward model",
        key="rollout.reward_model.path",
        path=settings.path,
        revision=settings.revision,
    )


def reward_facts(recipe: Recipe) -> ModelFacts | None:
    """Return the facts of the recipe's reward model, without loading it; None if it uses none.
    Raises RecipeError if the model returns no score."""
    path = reward_path(recipe)
    if path is None:
        return None
    if not (facts := path.facts(longest_tokens(recipe))).scores:
        raise RecipeError(
            f"`{path.path}` is not a reward model",
            why="it returns a next token instead of a score: its config.json does not describe "
            "a sequence-classification model with one label",
            fix="miles launch --recipe RECIPE --set train.objective=reward_model   # trains one",
        )
    return facts


def reward_model_folder(
    recipe: Recipe, run: RunDir, tokenizer: ChatTokenizer, *, output: Output | None
) -> Path | None:
    """Return the Hugging Face folder of the recipe's reward model; None if it uses none. Raises
    RecipeError if it has other tokens than the policy."""
    path = reward_path(recipe)
    if path is None:
        return None
    folder = path.folder(run.queried_model_dir("reward-model", path.path), output=output)
    path.refuse_other_tokens(folder, tokenizer=tokenizer, least=tokenizer.vocab_size)
    return folder


def teacher_paths(recipe: Recipe) -> list[AuxiliaryModel]:
    """Return the location of each teacher that the trainer's ranks hold."""
    return [
        AuxiliaryModel(what="teacher", key="train.distill.teachers", path=teacher.path or "")
        for teacher in recipe.local_teachers
    ]


def compare_tokenizers(recipe: Recipe, tokenizer: ChatTokenizer, facts: ModelFacts) -> list[str]:
    """Compare the tokenizer of each given model in a local folder with the policy's. Return the
    models that were not compared: names on the hub, and checkpoints of runs. Raises RecipeError as
    `AuxiliaryModel.refuse_other_tokens`."""
    single = [path for path in (draft_path(recipe), reward_path(recipe)) if path is not None]
    elsewhere = []
    for path in (*single, *teacher_paths(recipe), *policy_paths(recipe)):
        folder = Path(path.path).expanduser()
        if not folder.is_dir() or is_checkpoint(folder):
            elsewhere.append(f"the {path.what} {path.path}")
            continue
        least = tokenizer.vocab_size if path.what == "reward model" else facts.vocab_size
        path.refuse_other_tokens(folder, tokenizer=tokenizer, least=least)
    return elsewhere


def teacher_facts(recipe: Recipe) -> list[ModelFacts]:
    """Return the facts of each such teacher, without making or loading it. Raises RecipeError if
    one does not exist, CheckpointError if one is not a model."""
    return [_facts(teacher, recipe.longest_sequence) for teacher in teacher_paths(recipe)]


def _facts(teacher: AuxiliaryModel, longest: int) -> ModelFacts:
    facts = teacher.facts(longest)
    if facts.scores:
        raise RecipeError(
            f"the teacher {teacher.path} returns a score instead of a next token",
            why="it is a reward model, but a teacher must say how likely each token is",
            fix="name a language model",
        )
    return facts


def teacher_folders(
    recipe: Recipe,
    run: RunDir,
    *,
    tokenizer: ChatTokenizer,
    facts: ModelFacts,
    output: Output | None,
) -> list[Path]:
    """Return the Hugging Face folder of each teacher that the trainer's ranks hold. `facts`,
    `tokenizer`: the policy's. Raises RecipeError if a teacher has another tokenizer."""
    settings, folders = recipe.train.distill, []
    if recipe.teachers and settings.kl != "sampled" and settings.top_k >= facts.vocab_size:
        raise RecipeError(
            f"`train.distill.top_k` cannot be {settings.top_k}",
            why=f"the policy has {facts.vocab_size:,} tokens, and the distance needs at least "
            "one more than `top_k`",
            fix=f"--set train.distill.top_k={min(32, facts.vocab_size - 1)}",
        )
    for number, teacher in enumerate(teacher_paths(recipe)):
        folder = teacher.folder(run.teacher_model_dir(number), output=output)
        theirs = teacher.refuse_other_tokens(folder, tokenizer=tokenizer, least=facts.vocab_size)
        if theirs.eos_id != tokenizer.eos_id and output is not None:
            ends = [each.inner.convert_ids_to_tokens(each.eos_id) for each in (theirs, tokenizer)]
            output.warn(
                f"the teacher {teacher.path} ends responses with {ends[0]}, the policy with "
                f"{ends[1]}"
            )
        folders.append(folder)
    return folders


def served_teachers(
    recipe: Recipe, tokenizer: ChatTokenizer | None = None
) -> ServedTeachers | None:
    """Return the teachers that are called over HTTP; None if there are none. `tokenizer`: needed to
    score samples. Raises RecipeError if the environment lacks a key."""
    if not recipe.train.distill.is_served:
        return None
    from milescli.backends.sglang.client.teacher import ServedTeachers

    return ServedTeachers(recipe, tokenizer)


def check_served_teachers(recipe: Recipe, tokenizer: ChatTokenizer, facts: ModelFacts) -> list[str]:
    """Return the address of each served teacher and the model that it serves. `tokenizer`, `facts`:
    the policy's. Raises RecipeError if one has another tokenizer, EndpointError if it does not
    answer."""
    served = served_teachers(recipe)
    return [] if served is None else asyncio.run(served.meet(tokenizer, facts.vocab_size))


KEY = "rollout.roles"


def policy_paths(recipe: Recipe) -> list[AuxiliaryModel]:
    """Return the location of each policy of `rollout.policies`, in their order. These are older
    versions of the policy that play roles (`rollout.roles.NAME.policy`), each served by an engine
    like the policy's."""
    return [_path(text, Path(recipe.run.dir)) for text in recipe.rollout.policies]


def _path(text: str, runs: Path) -> AuxiliaryModel:
    """Return the location of a role's policy. `runs`: folder in which a run is looked up by its
    bare name."""
    path, at, step = text.rpartition("@")
    has_step = bool(at) and step.isdecimal()
    name = path if has_step else text
    named = runs / name
    if re.fullmatch(r"[\w.-]+", name) and (named / RECIPE_FILE).is_file():
        name = str(named)
    return AuxiliaryModel(what="policy", key=KEY, path=name, step=int(step) if has_step else None)


def require_policies(recipe: Recipe, facts: ModelFacts) -> None:
    """Check that each policy of a role exists and has the shape of the trained policy, whose
    `facts` these are. Raises RecipeError if one does not, CheckpointError if it is not a model."""
    for path in policy_paths(recipe):
        _require_same(path, path.facts(recipe.longest_sequence), facts)


def policy_folders(
    recipe: Recipe,
    run: RunDir,
    *,
    tokenizer: ChatTokenizer,
    facts: ModelFacts,
    output: Output | None,
) -> tuple[Path, ...]:
    """Return the Hugging Face folder of each policy, in the order of `rollout.policies`. Raises as
    `require_policies`, and RecipeError if one has another tokenizer."""
    folders = []
    for text, path in zip(recipe.rollout.policies, policy_paths(recipe), strict=True):
        folder = path.folder(run.queried_model_dir("role-model", text), output=output)
        _require_same(path, load_facts(folder), facts)
        path.refuse_other_tokens(folder, tokenizer=tokenizer, least=facts.vocab_size)
        folders.append(folder)
    return tuple(folders)


def without_policies(recipe: Recipe) -> Recipe:
    """Return the recipe with all roles played by the policy: for callers that only read its
    data."""
    roles = {
        name: role.model_copy(update={"policy": None})
        for name, role in recipe.rollout.roles.items()
    }
    return recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"roles": roles})})


def policies_by_role(recipe: Recipe, policies: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of `policies` by the roles that the policies play."""
    played = {name: role.policy for name, role in recipe.rollout.roles.items()}
    return {name: policies[path] for name, path in played.items() if path in policies}


def _require_same(path: AuxiliaryModel, theirs: ModelFacts, ours: ModelFacts) -> None:
    """Raise RecipeError if the policy of a role has another shape than the trained one: its engine
    is planned like the policy's."""
    different = [
        field.name
        for field in dataclasses.fields(ours)
        if getattr(ours, field.name) != getattr(theirs, field.name)
    ]
    if different:
        first = different[0]
        raise RecipeError(
            f"the policy {path.path} of a role is not a version of the trained policy",
            why=f"its `{first}` is {getattr(theirs, first)}, but that of the trained model is "
            f"{getattr(ours, first)}: the engines of a run serve only one architecture",
            fix="serve it elsewhere, and write `endpoint: {url: http://HOST:PORT/v1, model: "
            "NAME}` instead of `policy`",
        )


_TOLERANCE = 1e-6
"""Largest relative difference of a scaling."""


def require_adapter(recipe: Recipe, facts: ModelFacts) -> ModelFacts:
    """Return the facts unchanged if the run can train `model.adapter`. Raises CheckpointError if it
    is not a PEFT folder, RecipeError if it has another shape than `train.lora` trains over this
    model."""
    if recipe.model.adapter is None:
        return facts
    adapter, shape = read_outline(Path(recipe.model.adapter).expanduser()), trained_shape(recipe)
    assert shape is not None, "recipe.check lets no adapter pass that is not trained"
    of_adapter = adapter_table(table(facts), shape)
    wanted, present = set(pairs_of(of_adapter)), set(adapter.pairs)
    scalings = {adapter.scaling(module) for module in present}
    differs = list[tuple[str, str]]()
    if adapter.rank != shape.rank:
        differs.append((f"its rank is {adapter.rank}", f"--lora {adapter.rank}"))
    if any(abs(one - shape.scaling) > _TOLERANCE * shape.scaling for one in scalings):
        alpha = max(scalings) / dataclasses.replace(shape, rank=adapter.rank, alpha=1.0).scaling
        differs.append((f"its alpha is {alpha:g}", f"--set train.lora.alpha={alpha:.10g}"))
    if adapter.shared.keys() != shared_matrices(of_adapter).keys():
        kind = "shared_outer" if adapter.shared else "each"
        differs.append(
            (
                "its experts share a matrix" if adapter.shared else "its experts share nothing",
                f"--set train.lora.experts={kind}",
            )
        )
    if wanted != present:
        leaves = ", ".join(_leaves(present))
        fix = f"--set 'train.lora.targets=[{leaves}]'"
        if _leaves(wanted) == _leaves(present):
            fix = "--set train.lora.exclude=[]   # or the modules that it excludes"
        differs.append((f"it has {len(present)} pairs, at {leaves}, not {len(wanted)}", fix))
    elif adapter.rank == shape.rank and (odd := _shape_difference(adapter, of_adapter)):
        differs.append(
            (f"the size of `{odd}` differs", "--set model.path=FOLDER   # its base model")
        )
    if adapter.saved:
        saved = min(adapter.saved)
        differs.append((f"it also contains the whole of `{saved}`", "miles export it with --merge"))
    if differs:
        raise RecipeError(
            f"`model.adapter={recipe.model.adapter}` does not match `train.lora`",
            why="; ".join(what for what, _ in differs),
            fix=[fix for _, fix in differs],
        )
    return facts


def _leaves(modules: Iterable[str]) -> list[str]:
    return sorted({module.rpartition(".")[2] for module in modules})


def _shape_difference(adapter: AdapterOutline, of_adapter: WeightTable) -> str | None:
    sizes = of_adapter.hf_shapes()
    return next(
        (
            module
            for module, places in pairs_of(of_adapter).items()
            for place, size in zip(places, adapter.shapes[module], strict=True)
            if size != sizes[place.name][-2:]
        ),
        None,
    )
