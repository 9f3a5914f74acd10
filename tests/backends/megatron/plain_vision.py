"""A supervised step and one of GRPO on rows with images, by transformers and plain PyTorch:
`python -m tests.backends.megatron.plain_vision FOLDER OUT.safetensors`. In a process of its own,
for the trainer's CPU shim changes torch. OUT has `logits.ROW` before them, `gradient.NAME` of the
first, and `after.NAME` and `frozen.NAME`, the weights after both with a trained tower and with a
frozen one."""

from __future__ import annotations

import io
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from PIL import Image
from safetensors.torch import save_file

from tests.backends.megatron.vision_cases import (
    OPTIMIZER,
    PROCESSOR,
    SQUARE_PROCESSOR,
    file_of,
    groups_of,
    rows_of,
)

_TOWERS = (".visual.", ".vision_tower.", ".multi_modal_projector.")


def squares(files: list[bytes]) -> torch.Tensor:
    """[images, channels, rows, columns] by transformers' own processor."""
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    settings = {name: v for name, v in SQUARE_PROCESSOR.items() if name != "image_processor_type"}
    processor = Gemma3ImageProcessorPil(**{**settings, "size": dict(settings["size"])})
    made = processor([Image.open(io.BytesIO(file)) for file in files], return_tensors="np")
    return torch.from_numpy(made["pixel_values"])


def patches(file: bytes) -> torch.Tensor:
    """[patches, numbers] by transformers' own processor."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    settings = {name: v for name, v in PROCESSOR.items() if name != "image_processor_type"}
    processor = Qwen2VLImageProcessorPil(**{**settings, "size": dict(settings["size"])})
    made = processor(Image.open(io.BytesIO(file)), return_tensors="np")
    return torch.from_numpy(made["pixel_values"])


def logits(model: torch.nn.Module, row: dict) -> torch.Tensor:
    """[tokens, vocabulary]"""
    ids = torch.tensor([row["ids"]])
    seen = {}
    if row["images"]:
        kinds = torch.zeros_like(ids, dtype=torch.int)
        for image in row["images"]:
            _, rows, columns = image["grid"]
            kinds[0, image["start"] : image["start"] + rows * columns // 4] = 1
        files = [file_of(image) for image in row["images"]]
        if model.config.model_type == "gemma3":
            seen = {"pixel_values": squares(files), "token_type_ids": kinds}
            return model(input_ids=ids, use_cache=False, **seen).logits[0]
        seen = {
            "pixel_values": torch.cat([patches(file) for file in files]),
            "image_grid_thw": torch.tensor([image["grid"] for image in row["images"]]),
            "mm_token_type_ids": kinds,
        }
    return model(input_ids=ids, use_cache=False, **seen).logits[0]


def supervised(rows: list[dict]) -> Iterator[tuple[dict, float]]:
    """Each row with the weight of its tokens' log-probs."""
    yield from ((row, 1.0) for row in rows)


def grpo(rows: list[dict]) -> Iterator[tuple[dict, float]]:
    """The same, by arXiv 2402.03300, section 4.1.2."""
    for group in groups_of(rows):
        rewards = [float(row is group[-1]) for row in group]
        mean, std = statistics.mean(rewards), statistics.stdev(rewards)
        yield from ((row, (r - mean) / (std + 1e-6)) for row, r in zip(group, rewards, strict=True))


def step(model: torch.nn.Module, rows: list[tuple[dict, float]]) -> None:
    """Sets gradients of the mean over all trained tokens."""
    count = sum(len(row["ids"]) - row["prompt"] for row, _ in rows)
    loss = torch.zeros(())
    for row, weight in rows:
        ids = torch.tensor(row["ids"])
        logprobs = logits(model, row)[:-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        loss = loss - weight * logprobs[row["prompt"] - 1 :].sum() / count
    model.zero_grad()
    loss.backward()


def loaded(folder: Path) -> torch.nn.Module:
    """The model, whose experts are computed one by one."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(folder)
    if config.model_type != "gemma3":
        config._experts_implementation = config.text_config._experts_implementation = "eager"
    config.text_config.tie_word_embeddings = config.tie_word_embeddings
    return AutoModelForImageTextToText.from_pretrained(folder, config=config, dtype=torch.float32)


def main() -> None:
    """See above."""
    folder, out, model = Path(sys.argv[1]), {}, None
    torch.set_num_threads(1)
    for kind in ("after", "frozen"):
        model = loaded(folder)
        every = rows_of(model.config.to_dict())
        trained = [
            parameter
            for name, parameter in model.named_parameters()
            if kind == "after" or not any(tower in name for tower in _TOWERS)
        ]
        for parameter in set(model.parameters()) - set(trained):
            parameter.requires_grad_(False)
        if kind == "after":
            with torch.no_grad():
                out |= {f"logits.{n}": logits(model, row).clone() for n, row in enumerate(every)}
        optimizer = torch.optim.AdamW(
            [
                {
                    "params": [weight for weight in trained if weight.dim() > 1],
                    "weight_decay": OPTIMIZER["weight_decay"],
                },
                {"params": [weight for weight in trained if weight.dim() <= 1], "weight_decay": 0},
            ],
            lr=OPTIMIZER["lr"],
            betas=(0.9, 0.98),
            eps=OPTIMIZER["eps"],
        )
        for weighted in (supervised, grpo):
            step(model, list(weighted(every)))
            if weighted is supervised and kind == "after":
                out |= {
                    f"gradient.{name}": parameter.grad.clone()
                    for name, parameter in model.named_parameters()
                }
            torch.nn.utils.clip_grad_norm_(trained, OPTIMIZER["clip_grad"])
            optimizer.step()
        out |= {f"{kind}.{name}": weight.detach() for name, weight in model.named_parameters()}
    save_file({name: tensor.contiguous() for name, tensor in out.items()}, sys.argv[2])


if __name__ == "__main__":
    main()
