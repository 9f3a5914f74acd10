"""Stores results of evaluations: writes those of `miles eval` for each set, reads them back, and
compares two models by a paired test."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from milescli.checkpoint.run_dir import write_json
from milescli.core.errors import DataError
from milescli.core.files import read_json
from milescli.core.types import Group, Prompt
from milescli.data.tokenizer import encodable
from milescli.recipe.schema import Recipe, Rollout
from milescli.recipe.section import Section, set_option
from milescli.rollout.evaluation.scores import Answer, DomainScore, is_right
from milescli.rollout.evaluation.statistics import (
    Difference,
    Estimate,
    compare_paired,
    describe_difference,
)

SCHEMA = 1
"""Version of the JSON; incremented when a field changes its meaning or is removed."""
HELDOUT = "heldout"
"""Name of the recipe's own `data.eval`; its files are in `eval/` itself."""
Row = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class SetResult:
    """Holds the result of one set of prompts, answered by one model."""

    model: str
    """Name as the user typed it."""
    step: int
    """Step of the checkpoint; 0: a model that no run of miles trained."""
    set: str
    """Name of the set; heldout: the run's own `data.eval`."""
    accuracy: float
    """Mean reward over prompts and samples."""
    num_prompts: int
    samples_per_prompt: int
    estimates: Mapping[str, Estimate]
    """avg@n, pass@k, maj@k: see `rollout.evaluation.scores`."""
    domains: Mapping[str, DomainScore]
    truncated_fraction: float
    response_tokens_mean: float | None
    """None if an endpoint returned only text."""
    seconds: float
    path: str
    """File of the samples as .jsonl, relative to the run directory; the same as .parquet and this
    result as .json are next to it."""
    data_sha256: str
    """SHA-256 of the set's prompts and labels, in order, with those that were not scored."""
    settings: Mapping[str, object]
    """Other settings on which the figures depend."""
    rewards: Sequence[float]
    """[num_prompts] mean over samples; the paired test uses them."""
    unscored: Sequence[int] = field(default_factory=list)
    """Places in the set, counted from 0, of the prompts that were excluded because a sample could
    not be scored. `num_prompts` and `rewards` do not count them."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Parts of the reward, and the figures of `eval.metrics`."""

    @property
    def fingerprint(self) -> str:
        """Return 16 hex digits that are equal for equal data and settings."""
        text = json.dumps([self.data_sha256, self.settings], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def num_asked(self) -> int:
        """Return the number of prompts of the set, scored or not."""
        return self.num_prompts + len(self.unscored)

    def rewards_by_place(self) -> dict[int, float]:
        """Return the rewards by the place of their prompt in the set."""
        unscored = frozenset(self.unscored)
        scored = (place for place in range(self.num_asked) if place not in unscored)
        return dict(zip(scored, self.rewards, strict=True))


def rows_of(
    groups: Sequence[Group],
    *,
    domains: Mapping[int, str] | None = None,
    answer: Answer | None = None,
) -> list[Row]:
    """Return one row for each sample. `answer` adds the answer that it states, `domains` the domain
    of its prompt."""
    rows = []
    shows_images = any(group.prompt.images for group in groups)
    for group in groups:
        prompt = group.prompt
        for sample in group.samples:
            row: Row = {
                "index": prompt.index,
                "sample_index": sample.sample_index,
                "prompt": prompt.text,
                "response": sample.text,
                "label": prompt.label,
                "reward": sample.reward,
                "is_right": is_right(sample.reward or 0.0),
                "stop_reason": sample.stop_reason.value,
                "seed": sample.seed,
                "prompt_ids": prompt.token_ids,
                "response_ids": sample.response_ids,
            }
            if shows_images:
                row["images"] = [image.sha256 for image in prompt.images]
            if sample.reward_parts:
                row["reward_parts"] = dict(sample.reward_parts)
            if domains:
                row["domain"] = domains.get(prompt.index)
            if answer is not None:
                row["answer"] = answer(sample.text)
            rows.append(row)
    return rows


def write_lines(path: Path, groups: Sequence[Group]) -> None:
    """Write the samples as JSONL; makes the folder."""
    _write_lines(path, rows_of(groups))


def _write_lines(path: Path, rows: Sequence[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_result(result: SetResult, rows: Sequence[Row], *, folder: Path) -> None:
    """Write all three files of a result. `folder`: what `result.path` is relative to."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = folder / result.path
    _write_lines(path, rows)
    keys = dict.fromkeys(key for row in rows for key in row)  # a table has those of its first row
    shown = [{key: row.get(key) for key in keys} for row in rows]
    table = pa.Table.from_pylist(
        [{k: encodable(v) if isinstance(v, str) else v for k, v in row.items()} for row in shown]
    )
    pq.write_table(table, path.with_suffix(".parquet"))
    fields = {"schema": SCHEMA, "fingerprint": result.fingerprint, **asdict(result)}
    write_json(path.with_suffix(".json"), fields)


def read_result(path: Path) -> SetResult:
    """Read what `write_result` wrote. Raises DataError if the file is not such a result."""
    try:
        fields = read_json(path)
        assert fields.pop("schema") == SCHEMA, "it is of another version of miles"
        fields.pop("fingerprint")
        fields["estimates"] = {name: Estimate(**one) for name, one in fields["estimates"].items()}
        fields["domains"] = {
            name: DomainScore(num_prompts=one["num_prompts"], accuracy=Estimate(**one["accuracy"]))
            for name, one in fields["domains"].items()
        }
        return SetResult(**fields)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
        raise DataError(
            f"{path} is not a result of `miles eval`",
            why=f"{type(error).__name__}: {error}",
            fix=f"ls {shlex.quote(str(path.parent))}   # results are step_N.json",
        ) from None


def folder_of(set_name: str) -> str:
    """Return the name of a set's folder in `eval/`."""
    return "" if set_name == HELDOUT else set_name


def folder_of_model(model: str, evaluations: Path) -> Path:
    """Return the folder with the results of a model: a name on the hub, or a folder. The name of a
    folder alone would be that of many models."""
    folder = Path(model).expanduser()
    if not folder.exists():
        return evaluations / model.replace("/", "--")
    place = folder.resolve()
    digest = hashlib.sha256(os.fsencode(place)).hexdigest()[:8]
    return evaluations / f"{place.name}-{digest}"


def is_older_than_model(result: SetResult, folder: Path, model: str) -> bool:
    """Return True if the files of a model were changed after a result in `folder` was written, as
    by a second export to the same path. A name on the hub has no files here."""
    place = Path(model).expanduser()
    if not place.is_dir():
        return False
    written = (folder / result.path).with_suffix(".json").stat().st_mtime
    files = [place, *(file for file in place.iterdir() if file.is_file())]
    return any(file.stat().st_ctime > written for file in files)  # mtime is that of a copy's source


def folder_of_endpoint(url: str, evaluations: Path) -> Path:
    """Return the folder with the results of an endpoint's models, each in a subfolder."""
    parts = urlsplit(url)
    return evaluations / "-".join(str(part) for part in (parts.hostname, parts.port) if part)


def read_results(folder: Path, set_name: str) -> list[SetResult]:
    """Return all results of one set, by step; `folder`: the run's `eval/`. Unreadable files are
    left out."""
    results = []
    for path in (folder / set_name).glob("step_*.json"):
        try:
            results.append(read_result(path))
        except DataError:
            continue
    return sorted(results, key=lambda result: result.step)


def sha256_of_prompts(prompts: Sequence[Prompt]) -> str:
    """Return a digest that is equal for equal prompts with equal labels in the same order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        told = [prompt.text, prompt.label]
        chat = [turn for turn in prompt.turns if turn["role"] != "system"]  # it is a setting
        if len(chat) > 1 or prompt.tools:
            told += [chat, list(prompt.tools)]
        digest.update(json.dumps(told).encode() + b"\n")
    return digest.hexdigest()


def settings_of(recipe: Recipe) -> dict[str, object]:
    """Return what the figures depend on besides model and prompts, by the recipe's keys."""
    rollout, evaluation = recipe.rollout, recipe.eval
    return {
        "rollout.agent": rollout.agent,
        "rollout.generation": rollout.generation,
        "rollout.reward": rollout.reward,
        **_reward_settings(rollout),
        **({"rollout.tools": rollout.tools} if rollout.tools else {}),
        "rollout.stop": rollout.stop,
        "data.chat_template": recipe.data.chat_template,
        "data.system_prompt": recipe.data.system_prompt,
        "eval.function": evaluation.function,
        "eval.samples_per_prompt": evaluation.samples_per_prompt,
        "eval.temperature": evaluation.temperature,
        "eval.top_p": evaluation.top_p,
        "eval.max_response_tokens": evaluation.max_response_tokens or rollout.max_response_tokens,
        "run.seed": recipe.run.seed,
        **({"eval.endpoint.extra": extra} if (extra := evaluation.endpoint.extra) else {}),
    }


def _reward_settings(rollout: Rollout) -> dict[str, object]:
    """Return the settings of rewards in `rollout` that differ from the defaults: another judge
    gives other figures."""
    return {
        f"rollout.{name}": changed
        for name, section in rollout
        if isinstance(section, Section) and (changed := section.model_dump(exclude_defaults=True))
    }


REWARD = "rollout.reward"
Settings = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Describes how two models differ on one set."""

    set: str
    a: str
    b: str
    """Names as the user typed them, with the steps of checkpoints."""
    a_accuracy: float
    b_accuracy: float
    difference: Difference
    sentence: str
    num_left_out: int
    """Number of prompts that are not compared, because one of the two could not be scored on
    them."""
    other_settings: Sequence[str]
    """Recipe keys whose values differ between the two."""


def compare_results(ones: Sequence[SetResult], others: Sequence[SetResult]) -> list[Comparison]:
    """Compare each of `ones` with the one of `others` on the same set and prompts."""
    by_set = {other.set: other for other in others}
    return [_compared(one, by_set[one.set]) for one in ones]


def _compared(one: SetResult, other: SetResult) -> Comparison:
    assert one.data_sha256 == other.data_sha256, (one.set, "other prompts")
    rewards, other_rewards = one.rewards_by_place(), other.rewards_by_place()
    shared = [place for place in rewards if place in other_rewards]
    assert shared, "each result has more than half of the prompts (rollout.max_unscored_share)"
    difference = compare_paired(
        [rewards[place] for place in shared], [other_rewards[place] for place in shared]
    )
    steps = one.model == other.model or one.step or other.step
    a, b = (f"{x.model} at step {x.step}" if steps else x.model for x in (one, other))
    keys = sorted({*one.settings, *other.settings})
    return Comparison(
        set=one.set,
        a=a,
        b=b,
        a_accuracy=one.accuracy,
        b_accuracy=other.accuracy,
        difference=difference,
        sentence=describe_difference(difference, a=a, b=b) + _left_out(one.num_asked - len(shared)),
        num_left_out=one.num_asked - len(shared),
        other_settings=[key for key in keys if one.settings.get(key) != other.settings.get(key)],
    )


def _left_out(num: int) -> str:
    """Return a sentence about prompts that are not compared; empty if there are none."""
    if not num:
        return ""
    prompts = "1 prompt is" if num == 1 else f"{num:,} prompts are"
    return f" {prompts} left out: a sample of one of the two could not be scored."


def require_same_prompts(other: SetResult, name: str, data_sha256: str, settings: Settings) -> None:
    """Raise DataError if the other model got other prompts, or another reward."""
    if other.data_sha256 != data_sha256:
        raise DataError(
            f"`{other.model}` was evaluated on other prompts than those in `{name}`",
            why="a paired test compares prompt by prompt, but texts, labels, order or number "
            f"differ from those of {other.path}",
            fix=[
                f"--data {name}=FILE   # the prompts that it was evaluated on",
                f"--num-prompts {other.num_asked}",
            ],
        )
    theirs, mine = other.settings.get(REWARD), settings.get(REWARD)
    if theirs != mine:
        raise DataError(
            f"`{other.model}` was scored with another reward on `{name}`",
            why=f"`{REWARD}` was {theirs} and is {mine}",
            fix=set_option(REWARD, theirs),
        )


def find_result(folder: Path, name: str, *, step: int | None) -> SetResult | None:
    """Return the result of `miles eval` below `folder` for the set `name`, of one step or the
    newest; None if there is none."""
    results = read_results(folder / "eval", folder_of(name))
    found = [result for result in results if step is None or result.step == step]
    return found[-1] if found else None
