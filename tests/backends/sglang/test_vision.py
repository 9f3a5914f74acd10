"""Vision-language models on real engines: log-probs are those of transformers, for images of three
sizes and two in one prompt, before and after new weights were sent."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image as Pillow
from safetensors.torch import load_file, save_file

from milescli.backends.sglang.client.fleet import SglangFleet
from milescli.backends.sglang.launch.servable import fault_of_sglang
from milescli.backends.sglang.launch.server import EngineServer
from milescli.backends.sglang.launch.spec import EngineSpec
from milescli.backends.sglang.weights.channels import TensorChannel
from milescli.core.types import EngineAddress, Prompt, WeightVersion
from milescli.data.image_processor import ImageProcessor
from milescli.data.images import PromptImages
from milescli.data.scratch_tokenizer import make_scratch_tokenizer
from milescli.models import parse_facts
from milescli.models.scratch import make_model
from milescli.platform.ports import free_ports
from milescli.recipe.model import ScratchModel
from milescli.rollout.base import GenerateRequest
from milescli.rollout.episode.session import RecordingSession
from tests.buckets import into_buckets
from tests.families.cases import ALL

SHAPE = ScratchModel(family="qwen2_5_vl", num_layers=2, vocab_size=300)
IMAGE_ID, VIDEO_ID, START, END = 5, 6, 3, 4
STOPS = (IMAGE_ID, VIDEO_ID)
SIZES = ((56, 56), (84, 28), (112, 140))
"""Of pixels; the last is more than a window of the tower."""
LARGEST = 1e-4
"""Difference of log-probs."""


def picture(width: int, height: int, seed: int = 0) -> bytes:
    """Noise."""
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    buffer = io.BytesIO()
    Pillow.fromarray(noise).save(buffer, format="PNG")
    return buffer.getvalue()


def prompt_of(sees: PromptImages, sizes: list[tuple[int, int]], seed: int = 0) -> Prompt:
    """Text around images."""
    images = [sees.processor.read(picture(*size, seed + n)) for n, size in enumerate(sizes)]
    bare = [40, 41, *(token for _ in images for token in (START, IMAGE_ID, END, 50)), 60, 61]
    ids, spans, _ = sees.expanded(bare, images)
    return Prompt(index=0, token_ids=ids, text="", images=images, image_spans=spans)


def reference(folder: Path, prompt: Prompt, response: list[int]) -> list[float]:
    """Log-probs of the response by transformers."""
    from transformers import Qwen2_5_VLForConditionalGeneration

    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    processor, ids = ImageProcessor(folder), torch.tensor([[*prompt.token_ids, *response]])
    shown = torch.zeros_like(ids, dtype=torch.int32)
    for span in prompt.image_spans:
        shown[0, span.start : span.start + span.num_tokens] = 1
    pixels = [torch.from_numpy(processor.patches(image.png)) for image in prompt.images]
    with torch.no_grad():
        logits = model(
            input_ids=ids,
            pixel_values=torch.cat(pixels),
            image_grid_thw=torch.tensor([image.grid for image in prompt.images]),
            mm_token_type_ids=shown,
            use_cache=False,
        ).logits[0]
    logprobs, first = logits.double().log_softmax(-1), len(prompt.token_ids)
    return [logprobs[first - 1 + n, token].item() for n, token in enumerate(response)]


def sessions(fleet: SglangFleet, prompts: list[Prompt]) -> list[RecordingSession]:
    settings = GenerateRequest(prompt_ids=(), max_new_tokens=6)
    return [
        RecordingSession(
            fleet, prompt=prompt, seed=3, settings=settings, max_tokens=200, decode=lambda ids: ""
        )
        for prompt in prompts
    ]


def send(address: EngineAddress, weights: dict[str, torch.Tensor]) -> None:
    """Send all weights as a trainer does."""
    channel = TensorChannel(timeout_s=300)
    channel.open([address])
    channel.send(into_buckets(iter(weights.items()), 2**20))
    channel.verify(into_buckets(iter(weights.items()), 2**20))
    channel.close()


async def differences(fleet: SglangFleet, folder: Path, prompts: list[Prompt]) -> list[float]:
    """Largest difference of each prompt's response, asked for at once, and again with a second
    turn behind the first."""
    found = []
    talks = sessions(fleet, prompts)
    await asyncio.gather(
        *(talk.generate(prompt.token_ids) for talk, prompt in zip(talks, prompts, strict=True))
    )
    for talk, prompt in zip(talks, prompts, strict=True):
        first = talk.turns[0]
        if not {IMAGE_ID, VIDEO_ID} & set(first.response_ids):
            await talk.generate([*first.prompt_ids, *first.response_ids, 70, 71])
        for turn in talk.turns:
            start = len(prompt.token_ids)
            said = [*turn.prompt_ids[start:], *turn.response_ids]
            known = reference(folder, prompt, said)[-len(turn.response_ids) :]
            found.append(max(abs(a - b) for a, b in zip(turn.logprobs, known, strict=True)))
        (line,) = talk.trajectories()
        assert line.image_spans == prompt.image_spans
    return found


@pytest.mark.engine
def test_engines_see_images_as_transformers_does_also_after_new_weights(tmp_path: Path) -> None:
    folder, other = tmp_path / "a", tmp_path / "b"
    for where, seed in ((folder, 0), (other, 1)):
        make_scratch_tokenizer(["a"], SHAPE.vocab_size, where, sees_images=True)
        make_model(SHAPE, where, seed)
        weights = load_file(where / "model.safetensors")
        louder = {name: 4 * x if x.dim() > 1 else x for name, x in weights.items()}
        save_file(louder, where / "model.safetensors", metadata={"format": "pt"})
    spec = EngineSpec(
        model_dir=folder,
        tokenizer_dir=None,
        device_kind="cpu",
        precision="fp32",
        port=free_ports(1)[0],
        log_path=tmp_path / "engine.log",
        max_total_tokens=4096,
        context_length=256,
        prefix_cache=True,
    )
    address = EngineAddress(url=spec.url, tp=1, sharing_ranks=[0])
    sees = PromptImages(folder, IMAGE_ID)
    prompts = [prompt_of(sees, [size]) for size in SIZES]
    prompts.append(prompt_of(sees, list(SIZES[:2]), seed=7))

    async def compare() -> None:
        fleet = SglangFleet(
            router_url=None, engines=[address], response_timeout_s=300, stop_ids=STOPS
        )
        try:
            before = await differences(fleet, folder, prompts)
            await fleet.pause()
            await asyncio.to_thread(send, address, load_file(other / "model.safetensors"))
            await fleet.resume(WeightVersion(1))
            # the same images: what the old tower said of them is forgotten
            after = await differences(fleet, other, prompts)
        finally:
            await fleet.close()
        print(f"before {max(before):.1e}, after {max(after):.1e}")
        assert max(*before, *after) < LARGEST

    server = EngineServer(spec)
    server.start()
    try:
        server.wait_ready(600)
        asyncio.run(compare())
    finally:
        server.stop()


def test_a_tower_with_other_levels_than_sglang_knows_is_refused() -> None:
    config = ALL["qwen3-vl-moe"].config
    text = {**config["text_config"], "mlp_only_layers": []}
    facts = parse_facts({**config, "text_config": text})
    assert facts.vision is not None and "deepstack" in str(fault_of_sglang(facts))
