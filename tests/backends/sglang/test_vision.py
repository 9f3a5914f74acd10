"""Vision-language models on real engines: log-probs are those of transformers for prompts without
an image, with images of three sizes and with two, also after new weights of tower and decoder."""

from __future__ import annotations

import asyncio
import contextlib
import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from milescli.backends.sglang.client.fleet import SglangFleet
from milescli.backends.sglang.client.teacher import ServedTeachers
from milescli.backends.sglang.launch.spec import EngineSpec, check_servable
from milescli.backends.sglang.weights.channels import TensorChannel
from milescli.core.errors import AgentError, ContextFull, RecipeError
from milescli.core.types import Prompt, StopReason, Trajectory
from milescli.data.image_processor import load_processor
from milescli.data.images import content_of
from milescli.data.tokenizer import load_tokenizer
from milescli.models import load_facts
from milescli.recipe.schema import Recipe
from milescli.rollout.base import GenerateRequest
from milescli.rollout.episode.session import ChatForm, RecordingSession
from milescli.train.objectives.supervised import teacher_streams
from milescli.train.streams import Stream
from tests.backends.megatron import plain_vision
from tests.backends.megatron.vision_cases import IMAGE, rows_of
from tests.backends.sglang.conftest import KEY, Service, start_service
from tests.backends.sglang.seeing import END_OF_TURN, make_seeing, other_weights, picture, prompt_of
from tests.buckets import into_buckets
from tests.families.vision_cases import config
from tests.samples import make_trajectory

pytestmark = pytest.mark.engine
STOPS = (IMAGE, 121)
"""Tokens of images and videos, as a run has them."""
LARGEST = 1e-5
"""Difference of log-probs."""
WANTED = GenerateRequest(prompt_ids=(), max_new_tokens=12, seed=7)


class Seeing:
    """A tiny model, the engine that serves it, and what transformers says."""

    def __init__(self, folder: Path, family: str, **options: object) -> None:
        self.folder = folder / "model"
        make_seeing(self.folder, family)
        self.model = plain_vision.loaded(self.folder).eval()
        self.processor = load_processor(self.folder)
        config = json.loads((self.folder / "config.json").read_text())
        self.patch: int = config["vision_config"]["patch_size"]
        self.rows = rows_of({"model_type": family})
        self.prompts = [prompt_of(row, self.folder) for row in self.rows]
        started = start_service(self.folder, self.model, log_dir=folder, name=family, **options)
        self.service: Service = started

    def sampled(
        self,
        prompts: Sequence[Prompt],
        *,
        routing_shape: tuple[int, int] | None = None,
        **options: object,
    ) -> list[Trajectory]:
        """One trajectory for each, all asked for at once."""
        settings = replace(WANTED, **options)

        async def sample(fleet: SglangFleet) -> list[Trajectory]:
            sessions = [self.session(fleet, p, settings, seed=n) for n, p in enumerate(prompts)]
            await asyncio.gather(
                *(s.generate(p.token_ids) for s, p in zip(sessions, prompts, strict=True))
            )
            return [session.trajectories()[0] for session in sessions]

        return self.service.run(sample, stop_ids=STOPS, routing_shape=routing_shape)

    def session(
        self,
        fleet: SglangFleet,
        prompt: Prompt,
        settings: GenerateRequest,
        *,
        seed: int = 0,
        chats: bool = False,
    ) -> RecordingSession:
        tokenizer = load_tokenizer(self.folder)
        return RecordingSession(
            fleet,
            prompt=prompt,
            seed=seed,
            settings=settings,
            max_tokens=512,
            # with special tokens, which the tiny model says like any other
            decode=lambda ids: tokenizer.inner.decode([t for t in ids if t != END_OF_TURN]),
            chat_form=ChatForm(tokenizer=tokenizer) if chats else None,
        )

    def differ(self, lines: Sequence[Trajectory]) -> float:
        """The largest difference between the engine's log-probs and those of transformers."""
        return max(self._difference(line) for line in lines)

    def experts(self, line: Trajectory) -> np.ndarray:
        """[tokens, layers, topk] that transformers chooses."""
        chosen: list[torch.Tensor] = []
        hooks = [
            module.register_forward_pre_hook(lambda _, given: chosen.append(given[1]))
            for module in self.model.modules()
            if type(module).__name__.endswith("Experts")
        ]
        self._logits(line)
        for hook in hooks:
            hook.remove()
        return torch.stack(chosen, 1).numpy()

    def _difference(self, line: Trajectory) -> float:
        ids = torch.tensor(line.token_ids.tolist())
        said = self._logits(line)[:-1].double().log_softmax(-1)
        own = said.gather(-1, ids[1:, None])[:, 0]
        learned = torch.tensor(list(line.loss_mask[1:]), dtype=torch.bool)
        return float((own - torch.tensor(line.logprobs)[1:])[learned].abs().max())

    @torch.no_grad()
    def _logits(self, line: Trajectory) -> torch.Tensor:
        """[tokens, vocabulary] by transformers."""
        holders = (line, *self.prompts)
        shown = {image.sha256: image.png for holder in holders for image in holder.images}
        ids = torch.tensor([line.token_ids.tolist()])
        # transformers counts tokens of images by their id, and nothing is asked of the last one
        ids[0, -1] = 0
        kinds, seen = torch.zeros_like(ids, dtype=torch.int), {}
        for span in line.image_spans:
            kinds[0, span.start : span.start + span.num_tokens] = 1
        files = [shown[span.sha256] for span in line.image_spans]
        if self.model.config.model_type == "gemma3":
            if files:
                seen = {"pixel_values": plain_vision.squares(files), "token_type_ids": kinds}
            return self.model(input_ids=ids, use_cache=False, **seen).logits[0]
        if files:
            pixels = [torch.from_numpy(self.processor.patches(file)) for file in files]
            grids = torch.tensor([span.grid for span in line.image_spans])
            seen = {"image_grid_thw": grids, "pixel_values": torch.cat(pixels)}
        return self.model(input_ids=ids, use_cache=False, mm_token_type_ids=kinds, **seen).logits[0]

    def publish(self, folder: Path, changed: dict[str, torch.Tensor]) -> None:
        """As a run does, with its check of the whole model."""
        channel = TensorChannel(timeout_s=60)
        channel.open([self.service.address])
        self.service.publish(channel, into_buckets(iter(changed.items()), 9000), version=1)
        whole = load_file(folder / "model.safetensors")
        channel.verify(into_buckets(iter(whole.items()), 9000))
        channel.close()
        self.model = plain_vision.loaded(folder).eval()

    def stop(self) -> None:
        self.service.engine.stop()


@pytest.fixture(scope="module", params=["gemma3", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def seeing(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Seeing]:
    has_experts = request.param == "qwen3_vl_moe"
    folder = tmp_path_factory.mktemp(request.param)
    made = Seeing(folder, request.param, return_routed_experts=has_experts)
    yield made
    made.stop()


def test_engines_say_which_experts_saw_an_image(seeing):
    """Of every token, those of images too; as transformers chooses them."""
    facts = load_facts(seeing.folder)
    if not facts.num_experts:
        pytest.skip("the family has no experts")
    shape = (facts.num_layers, facts.topk)
    lines = seeing.sampled(seeing.prompts, want_routed_experts=True, routing_shape=shape)
    for line in lines:
        record = line.routed_experts
        assert record.num_tokens == line.num_tokens - 1
        chosen = np.frombuffer(record.indices, np.uint8).reshape(-1, *shape)
        said = seeing.experts(line)[: record.num_tokens]
        assert np.array_equal(np.sort(chosen, -1), np.sort(said, -1))


def test_logprobs_are_those_of_transformers_also_after_new_weights_of_the_tower(seeing, tmp_path):
    """The images that the engine saw before are seen by the new tower, too."""
    lines = seeing.sampled(seeing.prompts)
    assert [len(line.image_spans) for line in lines] == [0, 1, 2, 1, 1]
    before = seeing.differ(lines)
    changed = other_weights(seeing.folder, tmp_path / "other", tower=True)
    seeing.publish(tmp_path / "other", changed)
    stale = seeing.differ(lines)
    after = seeing.differ(seeing.sampled(seeing.prompts))
    print(f"{seeing.service.engine.spec.name}: before {before:.1e}, after {after:.1e}")
    assert max(before, after) <= LARGEST
    assert stale > 100 * LARGEST, "the new weights say the same, and prove nothing"


def test_a_later_turn_shows_the_images_again(seeing):
    prompt = seeing.prompts[2]

    async def talk(fleet: SglangFleet) -> list[Trajectory]:
        session = seeing.session(fleet, prompt, replace(WANTED, max_new_tokens=4))
        turn = await session.generate(prompt.token_ids)
        await session.generate([*turn.prompt_ids, *turn.response_ids, 55, 56])
        return session.trajectories()

    (line,) = seeing.service.run(talk, stop_ids=STOPS)
    assert list(line.image_spans) == list(prompt.image_spans)
    assert sum(line.loss_mask) > 4, "the second turn is not there"
    assert seeing.differ([line]) <= LARGEST


def test_an_image_of_a_tool_is_shown_in_the_next_turn(seeing):
    """Behind one of the prompt, and again in the turn after."""
    image = picture(seeing.rows[2]["images"][1], patch=seeing.patch)
    prompt = replace(seeing.prompts[1], turns=[{"role": "user", "content": "<image> t55"}])
    shown = content_of(["t56", image, "t57"])

    async def talk(session: RecordingSession) -> list[Trajectory]:
        messages = [*prompt.messages]
        with contextlib.suppress(ContextFull):  # it says an image token, as any other
            for result in ("t58", shown, "t59", "t60"):
                reply = await session.chat(messages)
                messages += [reply.message, {"role": "tool", "content": result}]
        return session.trajectories()

    async def talk_all(fleet: SglangFleet) -> list[Trajectory]:
        wanted = replace(WANTED, max_new_tokens=4)
        sessions = [seeing.session(fleet, prompt, wanted, seed=n, chats=True) for n in range(8)]
        return [line for lines in await asyncio.gather(*map(talk, sessions)) for line in lines]

    ends = load_tokenizer(seeing.folder).images.reserved_ids
    lines = seeing.service.run(talk_all, stop_ids=ends)
    whole = [line for line in lines if len(line.image_spans) == 2 and len(line.images) == 1]
    assert any(sum(line.loss_mask) > 12 for line in whole), "no dialogue had four turns"
    assert seeing.differ(lines) <= LARGEST


def test_a_served_teacher_sees_the_images(seeing, monkeypatch):
    monkeypatch.setenv("TEACHER_KEY", KEY)
    distill = {
        "teachers": [{"url": seeing.service.engine.url}],
        "kl": "sampled",
        "server": {"api_key_env": "TEACHER_KEY"},
    }
    prompt, row = seeing.prompts[2], seeing.rows[2]
    line = make_trajectory(row["ids"][: row["prompt"]], row["ids"][row["prompt"] :])
    line = replace(line, image_spans=prompt.image_spans)

    async def ask() -> Trajectory:
        teachers = ServedTeachers(Recipe.model_validate({"train": {"distill": distill}}))
        return (await teachers.with_predictions(prompt, [line]))[0]

    said = teacher_streams(asyncio.run(ask()).teacher)[Stream.TEACHER]
    assert seeing.differ([replace(line, logprobs=array("f", said))]) <= LARGEST


def test_a_sampled_image_token_ends_its_response_and_its_conversation(seeing):
    prompt = seeing.prompts[1]
    lines = seeing.sampled([prompt] * 32, max_new_tokens=64)
    ended = [line for line in lines if line.token_ids[-1] == IMAGE]
    assert ended, "no response has an image token, and nothing is proved"
    assert all(line.token_ids[len(prompt.token_ids) : -1].count(IMAGE) == 0 for line in lines)
    assert seeing.differ(ended) <= LARGEST

    async def go_on(fleet: SglangFleet) -> None:
        session = seeing.session(fleet, prompt, replace(WANTED, max_new_tokens=64))
        session._seed = lines.index(ended[0])
        turn = await session.generate(prompt.token_ids)
        assert turn.response_ids[-1] == IMAGE
        assert turn.stop_reason is StopReason.STOP
        with pytest.raises(ContextFull):
            await session.generate([*turn.prompt_ids, *turn.response_ids, 55])

    seeing.service.run(go_on, stop_ids=STOPS)


def test_tokens_of_an_image_without_one_are_not_sent(seeing):
    """An engine would never answer."""
    prompt = seeing.prompts[1]

    async def ask(fleet: SglangFleet) -> None:
        session = seeing.session(fleet, prompt, WANTED)
        with pytest.raises(AgentError, match="image tokens"):
            await session.generate([*prompt.token_ids, IMAGE])

    seeing.service.run(ask)


def test_an_engine_keeps_what_a_frozen_tower_says(tmp_path):
    """Right while the tower stays; the cache outlives a publication of another tower, which is why
    engines of a trained tower have none."""
    made = Seeing(tmp_path, "qwen2_5_vl", keeps_features=True)
    try:
        assert made.differ(made.sampled(made.prompts)) <= LARGEST
        changed = other_weights(made.folder, tmp_path / "decoder", tower=False)
        made.publish(tmp_path / "decoder", changed)
        assert made.differ(made.sampled(made.prompts)) <= LARGEST
        changed = other_weights(made.folder, tmp_path / "all", tower=True)
        made.publish(tmp_path / "all", changed)
        assert made.differ(made.sampled(made.prompts)) > 100 * LARGEST
    finally:
        made.stop()


_MOE = {"mlp_only_layers": []}


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        (config("qwen3_vl_moe", text=_MOE), "2 deepstack layers"),
        (config("qwen2_5_vl"), "has 96 numbers"),
        (config("qwen2_5_vl", tower={"patch_size": 14, "hidden_size": 1176}), "width 1176"),
    ],
)
def test_towers_that_sglang_mistakes_are_refused(tmp_path, shape, why):
    """They would end the engine at its first image, or be left out."""
    (tmp_path / "config.json").write_text(json.dumps(shape))
    spec = EngineSpec(
        model_dir=tmp_path,
        tokenizer_dir=None,
        device_kind="cpu",
        precision="fp32",
        port=1,
        log_path=tmp_path / "log",
    )
    with pytest.raises(RecipeError, match="SGLang cannot serve") as raised:
        check_servable(spec)
    assert why in raised.value.why
