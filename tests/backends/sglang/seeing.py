"""Tiny vision-language models that engines serve, and prompts that show images; shared by the tests
of engines and of whole runs."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from PIL import Image as Pillow
from safetensors.torch import load_file, save_file

from milescli.core.types import ImageSpan, Prompt
from milescli.data.image_processor import load_processor
from tests.backends.megatron.vision_cases import IMAGE, PROCESSOR, SQUARE_PROCESSOR
from tests.families.cases import Case
from tests.families.making import make
from tests.families.vision_cases import GEMMA, config

END_OF_TURN = 1
_LONG = {"max_position_embeddings": 2048}
MODELS = {
    # patches of 14 x 14 pixels, which are all that SGLang knows there
    "qwen2_5_vl": config("qwen2_5_vl", text=_LONG, tower={"patch_size": 14, "window_size": 56}),
    "qwen3_vl": config("qwen3_vl", text=_LONG),
    # experts in every layer and three levels of features, which is all that SGLang knows
    "qwen3_vl_moe": config(
        "qwen3_vl_moe",
        text={**_LONG, "mlp_only_layers": []},
        tower={"deepstack_visual_indexes": [0, 1, 2]},
    ),
    "gemma3": {**GEMMA, "text_config": {**GEMMA["text_config"], **_LONG}},
}
_CHAT = (
    "{% for m in messages %}{{ m.role }} {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|> "
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %} <eos> {% endfor %}assistant"
)


_MARKS = {
    "gemma3": {120: "<image_soft_token>", 122: "<start_of_image>", 123: "<end_of_image>"},
}
"""Tokens of images, where they are not those of the Qwen line."""


def make_seeing(folder: Path, family: str) -> None:
    """A model with a tokenizer and an image processor. SGLang looks for images in the decoded text,
    by the marks of this family, one behind the other."""
    settings = MODELS[family] | {"eos_token_id": END_OF_TURN}
    # experts as releases hold them, which transformers does not write
    make(folder, Case(settings, made_by_transformers=family != "qwen3_vl_moe"))
    write_tokenizer(folder, _MARKS.get(family, {}))
    if family == "gemma3":
        count = {"image_seq_length": settings["mm_tokens_per_image"]}
        (folder / "processor_config.json").write_text(
            json.dumps({"processor_class": "Gemma3Processor", **count})
        )
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        (folder / name).write_text(json.dumps(_processor(settings)))


def _processor(settings: dict) -> dict:
    if settings["model_type"] == "gemma3":
        return SQUARE_PROCESSOR
    patch = settings["vision_config"]["patch_size"]
    size = {"shortest_edge": 4 * patch**2, "longest_edge": 400 * patch**2}
    return {**PROCESSOR, "patch_size": patch, "size": size}


def picture(image: dict, *, patch: int) -> bytes:
    """A PNG of noise with the grid of an image of `vision_cases`."""
    rows, columns = image.get("size", image["grid"][1:])
    generator = np.random.default_rng(image["seed"])
    pixels = generator.integers(0, 256, (patch * rows, patch * columns, 3), np.uint8)
    buffer = io.BytesIO()
    Pillow.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()


def write_tokenizer(folder: Path, marks: Mapping[int, str]) -> None:
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    named = {0: "<pad>", END_OF_TURN: "<eos>", 2: "<unk>", 3: "user", 4: "assistant"}
    named |= {
        120: "<|image_pad|>",
        121: "<|video_pad|>",
        122: "<|vision_start|>",
        123: "<|vision_end|>",
    }
    named |= marks
    words = {named.get(index, f"t{index}"): index for index in range(131)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=[named[token] for token in (120, 121, 122, 123)],
        **(
            {"image_token": marks[120], "boi_token": marks[122], "eoi_token": marks[123]}
            if marks
            else {}
        ),
    )
    fast.chat_template = _CHAT
    fast.save_pretrained(folder)


def prompt_of(row: dict, folder: Path, *, index: int = 0) -> Prompt:
    """A row of `vision_cases`, without its response, as data has it."""
    processor = load_processor(folder)
    patch = json.loads((folder / "config.json").read_text())["vision_config"]["patch_size"]
    images = [processor.read(picture(image, patch=patch)) for image in row["images"]]
    assert [list(read.grid) for read in images] == [image["grid"] for image in row["images"]]
    spans = [
        ImageSpan(
            start=image["start"], num_tokens=read.num_tokens, grid=read.grid, sha256=read.sha256
        )
        for image, read in zip(row["images"], images, strict=True)
    ]
    ids = row["ids"][: row["prompt"]]
    assert ids.count(IMAGE) == sum(span.num_tokens for span in spans), row
    return Prompt(index=index, token_ids=ids, text="what is it?", images=images, image_spans=spans)


def other_weights(folder: Path, target: Path, *, tower: bool) -> dict[str, torch.Tensor]:
    """Write the same model with other numbers, those of its tower only if asked, and return what
    changed."""
    shutil.copytree(folder, target)
    generator = torch.Generator().manual_seed(9)
    own = load_file(folder / "model.safetensors")
    changed = {
        name: tensor + 0.2 * tensor.std() * torch.randn(tensor.shape, generator=generator)
        for name, tensor in own.items()
        if tensor.dim() > 1 and (tower or "visual" not in name)
    }
    save_file(own | changed, target / "model.safetensors", metadata={"format": "pt"})
    return changed
