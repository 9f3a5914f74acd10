"""Writes rollouts/step_N.jsonl: some samples of each step, for people to read, token by token. The
loop waits for a file only if the one of the step before is not written yet; the run itself reads
none of them."""

from __future__ import annotations

import asyncio
import json
import os
from array import array
from collections.abc import Mapping, Sequence

import numpy as np

from milescli.checkpoint.run_dir import RunDir
from milescli.core.concurrency import in_thread
from milescli.core.types import Group, Sample, Trajectory
from milescli.data.token_texts import TokenTexts
from milescli.data.tokenizer import ChatTokenizer
from milescli.runtime.recording.side_files import SideFiles
from milescli.train.base import TrainSequence
from milescli.train.packing import images_of

DETAILED_TOKENS = 32_768
"""Number of tokens of one step that are recorded one by one; the rest is text alone."""
Place = tuple[int, int, int]
"""(group, sample, trajectory), each counted from 0."""
TrainerLogprobs = Mapping[Place, Sequence[float]]
"""[num_tokens] log-prob of each token, by the trainer before the first update of the step."""
NONE: TrainerLogprobs = {}


class SampleFiles:
    """Writes the samples of each step to the run's `rollouts/`. Belongs to one attempt and one
    event loop."""

    def __init__(
        self, run: RunDir, tokenizer: ChatTokenizer, *, side: SideFiles, num_groups: int
    ) -> None:
        self.num_groups = num_groups
        """Number of groups that are kept of each step."""
        self._run, self._side = run, side
        self._texts = TokenTexts(tokenizer)
        self._writing: asyncio.Task[None] | None = None

    async def keep(
        self, step: int, groups: Sequence[Group], trainer: TrainerLogprobs = NONE
    ) -> None:
        """Start to write the first groups, once those of the step before are written."""
        await self.finish()
        if self.num_groups:
            own = list(groups[: self.num_groups])
            self._writing = asyncio.ensure_future(self._write(step, own, trainer))

    async def finish(self) -> None:
        """Wait until all files are written."""
        if (writing := self._writing) is not None:
            self._writing = None
            await writing

    async def _write(self, step: int, groups: list[Group], trainer: TrainerLogprobs) -> None:
        try:
            text = await in_thread(lambda: lines_of(groups, texts=self._texts, trainer=trainer))
        except Exception as error:  # a fault of ours: what is kept to be read ends no run
            self._side.warn_once(f"samples are not stored: {type(error).__name__}: {error}")
            return
        with self._side.writing(self._run.images_dir / "a picture"):
            write_images(self._run, groups)
        self._side.write(self._run.rollouts_dir / f"step_{step}.jsonl", text)


def write_images(run: RunDir, groups: Sequence[Group]) -> None:
    """Write the images of the groups that are not on disk yet. Raises OSError if the disk fails."""
    for sha256, png in images_of(groups).items():
        file = run.image_file(sha256)
        if not file.exists():
            file.parent.mkdir(exist_ok=True)
            partial = file.with_suffix(f".{os.getpid()}")
            partial.write_bytes(png)
            partial.replace(file)


def detailed(groups: Sequence[Group]) -> dict[Place, Trajectory]:
    """Return the samples that are written token by token: whole samples in order, up to
    DETAILED_TOKENS."""
    places, left = dict[Place, Trajectory](), DETAILED_TOKENS
    for group_index, group in enumerate(groups):
        for sample_index, sample in enumerate(group.samples):
            left -= sum(line.num_tokens for line in sample.trajectories)
            if left < 0:
                return places
            for index, line in enumerate(sample.trajectories):
                places[group_index, sample_index, index] = line
    return places


def sequences_of(groups: Sequence[Group], sequences: Sequence[TrainSequence]) -> dict[Place, int]:
    """Return place -> index in `sequences` for the trajectories that are written token by token:
    the sequences with the same tokens, in the same order."""
    wanted: dict[bytes, list[Place]] = {}
    for place, line in detailed(groups).items():
        wanted.setdefault(line.token_ids.tobytes(), []).append(place)
    found: dict[Place, int] = {}
    for number, sequence in enumerate(sequences):
        if not wanted:
            break
        tokens = np.asarray(sequence.token_ids, np.int32).tobytes()
        if places := wanted.get(tokens):
            found[places.pop(0)] = number
            if not places:
                del wanted[tokens]
    return found


def trainer_logprobs(
    shown: Mapping[Place, int], logprobs: Mapping[int, np.ndarray]
) -> TrainerLogprobs:
    """Return the trainer's log-probs of the samples that are written. `logprobs`: as
    `StepResult.logprobs`."""
    return {p: logprobs[n].tolist() for p, n in shown.items() if n in logprobs}


def lines_of(groups: Sequence[Group], *, texts: TokenTexts, trainer: TrainerLogprobs = NONE) -> str:
    """Return the text of the whole file: one JSON object for each sample."""
    lines, whole = list[str](), detailed(groups)
    for group_index, group in enumerate(groups):
        for sample_index, sample in enumerate(group.samples):
            shown = list[dict[str, object]]()
            for index, line in enumerate(sample.trajectories):
                if (place := (group_index, sample_index, index)) in whole:
                    shown.append(_detailed(line, texts, trainer.get(place)))
                else:
                    shown.append(_line(line, texts.decode(line.token_ids)))
            lines.append(json.dumps(_record(group, sample, shown)))
    return "".join(line + "\n" for line in lines)


def _record(group: Group, sample: Sample, shown: list[dict[str, object]]) -> dict[str, object]:
    episode = {**sample.figures, "trajectories": [line["text"] for line in shown]}
    returned = {image.sha256: None for line in sample.trajectories for image in line.images}
    return {
        "prompt": group.prompt.text,
        **({"images": [one.sha256 for one in group.prompt.images]} if group.prompt.images else {}),
        **({"returned_images": list(returned)} if returned else {}),
        "response": sample.text,
        "reward": sample.reward,
        **({"reward_parts": dict(sample.reward_parts)} if sample.reward_parts else {}),
        **({"episode": episode} if sample.figures else {}),
        "stop_reason": sample.stop_reason.value,
        "versions": [span.version for span in sample.version_spans],
        "seed": sample.seed,
        "prompt_index": group.prompt.index,
        "sample_index": sample.sample_index,
        "label": group.prompt.label,
        "response_ids": sample.response_ids,
        "lines": shown,
    }


def _line(trajectory: Trajectory, text: str) -> dict[str, object]:
    """Return the line of a trajectory without details."""
    return {**({"role": trajectory.role} if trajectory.role else {}), "text": text}


def _detailed(
    trajectory: Trajectory, texts: TokenTexts, trainer: Sequence[float] | None
) -> dict[str, object]:
    text, lengths = texts.split(trajectory.token_ids)
    mask = trajectory.loss_mask
    return {
        **_line(trajectory, text),
        "lengths": lengths,
        "mask": run_lengths(mask),
        "logprobs": _learned_values(trajectory.logprobs, mask),
        **({"trainer_logprobs": _learned_values(trainer, mask)} if trainer is not None else {}),
        "versions": [[span.start, span.end, span.version] for span in trajectory.version_spans],
    }


def _learned_values(values: array[float] | Sequence[float], mask: bytes) -> list[float]:
    """Return [num learned tokens] rounded to 4 decimals."""
    return [round(float(v), 4) for v, learned in zip(values, mask, strict=True) if learned]


def run_lengths(mask: bytes) -> list[int]:
    """Return the lengths of alternating runs of the mask: tokens that are not learned, then
    learned, then not, and so on; the first may be 0."""
    runs, current = [0], 0
    for learned in mask:
        if bool(learned) != bool(current):
            runs.append(0)
            current = 1 - current
        runs[-1] += 1
    return runs
