"""What of a step's samples is kept for people: token by token, within bounds."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from milescli.checkpoint.run_dir import RunDir
from milescli.core.events import EventBus
from milescli.core.types import Group, Image, Prompt
from milescli.data.scratch_tokenizer import make_scratch_tokenizer
from milescli.data.token_texts import TokenTexts
from milescli.data.tokenizer import ChatTokenizer, load_tokenizer
from milescli.runtime.recording.sample_files import (
    DETAILED_TOKENS,
    SampleFiles,
    lines_of,
    run_lengths,
)
from milescli.runtime.recording.side_files import SideFiles
from tests.samples import make_group, make_sample, make_trajectory

PROMPT = Prompt(index=7, token_ids=[40, 41], text="two?", label="2")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    """Of bytes alone."""
    folder = tmp_path_factory.mktemp("tokenizer")
    make_scratch_tokenizer(["one two"], 270, folder)
    return load_tokenizer(folder)


def _group(tokenizer: ChatTokenizer) -> Group:
    prompt, answer = (tokenizer.inner(text)["input_ids"] for text in ("two?", "7 or ü"))
    mask = [place != 1 for place in range(len(answer))]
    logprobs = [-0.123456 - place for place in range(len(answer))]
    line = make_trajectory(prompt, answer, mask=mask, logprobs=logprobs, version=3)
    spoken = replace(make_trajectory([*prompt, *answer], []), role="judge")
    return make_group([make_sample(line, spoken, index=0, text="7 or ü")], prompt=PROMPT)


def test_a_line_says_of_each_token_what_it_is(tokenizer: ChatTokenizer) -> None:
    group = _group(tokenizer)
    own = group.samples[0].trajectories[0]
    told = {(0, 0, 0): [-2.00004] * own.num_tokens}
    [record] = map(
        json.loads, lines_of([group], texts=TokenTexts(tokenizer), trainer=told).split("\n")[:-1]
    )
    assert (record["sample_index"], record["label"], record["prompt_index"]) == (0, "2", 7)
    line, judge = record["lines"]
    assert line["text"] == "two?7 or ü" and sum(line["lengths"]) == len(line["text"])
    learned = [bool(m) for m in own.loss_mask]
    shown = [place % 2 == 1 for place, run in enumerate(line["mask"]) for _ in range(run)]
    assert shown == learned
    assert line["logprobs"][0] == -0.1235 and len(line["logprobs"]) == sum(learned)
    assert line["trainer_logprobs"] == [-2.0] * sum(learned)
    assert line["versions"] == [[4, own.num_tokens, 3]]
    assert judge["role"] == "judge" and judge["mask"] == [own.num_tokens]
    assert "trainer_logprobs" not in judge and "role" not in line


def test_run_lengths_begin_with_what_is_not_learned() -> None:
    assert run_lengths(b"") == [0]
    assert run_lengths(b"\1\1\0\1") == [0, 2, 1, 1]
    assert run_lengths(b"\0\1") == [1, 1]


def test_only_so_many_tokens_are_told_one_by_one(tokenizer: ChatTokenizer) -> None:
    each = DETAILED_TOKENS // 4
    sample = make_sample(make_trajectory([40], [41] * (each - 1)))
    group = make_group([replace(sample, sample_index=index) for index in range(6)])
    records = [
        json.loads(line) for line in lines_of([group], texts=TokenTexts(tokenizer)).splitlines()
    ]
    assert ["lengths" in record["lines"][0] for record in records] == [True] * 4 + [False] * 2
    assert len({record["lines"][0]["text"] for record in records}) == 1


def test_files_are_written_beside_the_loop_and_in_order(
    tokenizer: ChatTokenizer, tmp_path: Path
) -> None:
    async def steps() -> None:
        kept = SampleFiles(RunDir(tmp_path), tokenizer, side=SideFiles(EventBus()), num_groups=1)
        for step in (1, 2, 3):
            await kept.keep(step, [_group(tokenizer), _group(tokenizer)])
        await kept.finish()

    asyncio.run(asyncio.wait_for(steps(), timeout=120))
    files = [tmp_path / "rollouts" / f"step_{step}.jsonl" for step in (1, 2, 3)]
    assert [len(file.read_text().splitlines()) for file in files] == [1, 1, 1]
    assert all(a.stat().st_mtime_ns <= b.stat().st_mtime_ns for a, b in pairwise(files))


def test_a_picture_is_kept_once_however_many_samples_show_it(
    tokenizer: ChatTokenizer, tmp_path: Path
) -> None:
    shown = [
        Image(sha256=str(n) * 64, png=bytes([n]), width=1, height=1, grid=(1, 2, 2), num_tokens=1)
        for n in (1, 2)
    ]
    group = replace(_group(tokenizer), prompt=replace(PROMPT, images=shown))

    async def steps() -> None:
        kept = SampleFiles(RunDir(tmp_path), tokenizer, side=SideFiles(EventBus()), num_groups=2)
        for step in (1, 2):
            await kept.keep(step, [group, group])
        await kept.finish()

    asyncio.run(asyncio.wait_for(steps(), timeout=120))
    files = sorted((tmp_path / "images").iterdir())
    assert [(file.stem, file.read_bytes()) for file in files] == [
        (one.sha256, one.png) for one in shown
    ]
    lines = (tmp_path / "rollouts" / "step_2.jsonl").read_text().splitlines()
    assert [json.loads(line)["images"] for line in lines] == 2 * [[one.sha256 for one in shown]]


def test_a_fault_of_what_is_kept_ends_no_run(
    tokenizer: ChatTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> str:
        raise UnicodeError("a fault of ours")

    monkeypatch.setattr("milescli.runtime.recording.sample_files.lines_of", broken)
    told = list[str]()
    bus = EventBus(listeners=[lambda event: told.append(event.text)])
    kept = SampleFiles(RunDir(tmp_path), tokenizer, side=SideFiles(bus), num_groups=1)

    async def keep() -> None:
        for step in (1, 2):
            await kept.keep(step, [_group(tokenizer)])
        await kept.finish()

    asyncio.run(keep())
    assert told == ["samples are not stored: UnicodeError: a fault of ours"]
