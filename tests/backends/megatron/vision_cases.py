"""Vision-language models under several layouts: rows with no image, one, two of different sizes,
one at the start, and two rows that show the same one. `plain_vision` computes the same by
transformers and plain PyTorch."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

from milescli.core.types import ImageSpan, Trajectory
from milescli.data.chat_masks import demonstration_trajectory
from milescli.train.base import TrainShard
from milescli.train.objectives import load_objective
from milescli.train.packing import pack
from tests.backends.megatron.harness import scores_everywhere, trainer
from tests.samples import make_group, make_sample, make_trajectory

IMAGE, START, END, PATCH = 120, 122, 123, 4
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": PATCH,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 6400},
}
"""preprocessor_config.json of the models."""
OPTIMIZER = {"lr": 1e-2, "eps": 1e-2, "weight_decay": 0.1, "clip_grad": 1.0}
"""Adam with an epsilon beside which rounding of small gradients does not show."""


def _row(prompt: list, response: list[int]) -> dict:
    """`prompt` has token ids, and (rows, columns, seed) of images."""
    ids: list[int] = []
    images = []
    for part in prompt:
        if isinstance(part, int):
            ids.append(part)
            continue
        rows, columns, seed = part
        ids.append(START)
        images.append({"start": len(ids), "grid": [1, rows, columns], "seed": seed})
        ids += [IMAGE] * (rows * columns // 4) + [END]
    return {"prompt": len(ids), "ids": [*ids, *response], "images": images}


ROWS = [
    # a model may sample the id of the image token, which is no image
    _row([5, 9, 100], [3, 77, IMAGE, 42, 8]),
    _row([17, 4, (4, 6, 1), 60], [61, 62, 63, 2]),
    _row([30, (8, 6, 2), 31, 32, (2, 10, 3), 33], [34, 35, 36, 37, 38, 2]),
    _row([(6, 6, 4)], [11, 12]),
    _row([88, (4, 6, 1)], [7, 7, 9]),
]
SQUARE_PROCESSOR = {
    "image_processor_type": "Gemma3ImageProcessor",
    "do_pan_and_scan": False,
    "image_mean": [0.5, 0.4, 0.5],
    "image_std": [0.5, 0.5, 0.3],
    "size": {"height": 4 * PATCH, "width": 4 * PATCH},
}
"""Of Gemma 3: pictures of other sizes become squares of 4 x 4 patches."""


def _squared(row: dict) -> dict:
    """The same row for a model that makes four tokens of every image."""
    ids, images, token = [], [], 0
    for image in row["images"]:
        _, rows, columns = image["grid"]
        ids += row["ids"][token : image["start"]]
        images.append({**image, "start": len(ids), "grid": [1, 4, 4], "size": (rows, columns)})
        ids += [IMAGE] * 4
        token = image["start"] + rows * columns // 4
    prompt = row["prompt"] - token
    ids += row["ids"][token:]
    return {"prompt": len(ids) - len(row["ids"][token:]) + prompt, "ids": ids, "images": images}


SQUARE_ROWS = [_squared(row) for row in ROWS]


def processor_of(config: dict) -> dict:
    """preprocessor_config.json of a model with this config.json."""
    return SQUARE_PROCESSOR if config["model_type"] == "gemma3" else PROCESSOR


def rows_of(config: dict) -> list[dict]:
    """ROWS, as a model with this config.json sees them."""
    return SQUARE_ROWS if config["model_type"] == "gemma3" else ROWS


def groups_of(rows: list[dict]) -> list[tuple[dict, ...]]:
    """Samples that are compared with each other; the reward of a group's last is 1."""
    return [(rows[1], rows[4]), (rows[2], rows[0], rows[3])]


def file_of(image: dict) -> bytes:
    """A PNG of noise."""
    rows, columns = image.get("size", image["grid"][1:])
    generator = np.random.default_rng(image["seed"])
    pixels = generator.integers(0, 256, (PATCH * rows, PATCH * columns, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()


def _spans(row: dict) -> tuple[ImageSpan, ...]:
    return tuple(
        ImageSpan(
            start=image["start"],
            num_tokens=image["grid"][1] * image["grid"][2] // 4,
            grid=tuple(image["grid"]),
            sha256=str(image["seed"]),
        )
        for image in row["images"]
    )


def _trajectory(row: dict, *, sampled: bool) -> Trajectory:
    made = make_trajectory if sampled else demonstration_trajectory
    trajectory = made(row["ids"][: row["prompt"]], row["ids"][row["prompt"] :])
    return replace(trajectory, image_spans=_spans(row))


def shard_of(made, *, objective: str = "supervised", rows: list | None = None) -> TrainShard:
    """This rank's part of ROWS, or of their groups for the objective `policy`."""
    every = SQUARE_ROWS if made.policy.facts.vision.tower == "siglip" else ROWS
    items: list = [_trajectory(row, sampled=False) for row in (rows or every)]
    if objective == "policy":
        items = [
            make_group(
                [
                    make_sample(
                        _trajectory(row, sampled=True), reward=float(row is group[-1]), index=index
                    )
                    for index, row in enumerate(group)
                ]
            )
            for group in groups_of(every)
        ]
    batch = pack(
        load_objective(objective, made.recipe).sequences(items),
        objective=objective,
        dp=made.mesh.layout.dp,
        max_tokens_per_microbatch=45,
        images={str(image["seed"]): file_of(image) for row in every for image in row["images"]},
    )
    return batch.shards[made.mesh.dp_rank]


def seeing_trainer(*, train: dict | None = None, vision: str = "all", **world):
    """A trainer rank with the settings of this module."""
    settings = {"optimizer": dict(OPTIMIZER), **(train or {})}
    return trainer(train=settings, vision=vision, **world)


def vision_steps(
    *,
    rank: int,
    size: int,
    port: int,
    model: str,
    layout: dict,
    save: str,
    train: dict | None = None,
    vision: str = "all",
    precision: str = "fp32",
) -> dict:
    """Scores, then a supervised step and one of GRPO; what is published before and after, and how
    often the tower was asked. Weights go to `save`."""
    world = {"rank": rank, "size": size, "port": port, "model": model, "layout": layout}
    made = seeing_trainer(train=train, vision=vision, precision=precision, **world)
    images: list[int] = []
    if (tower := getattr(made.model.module, "vision", None)) is not None:
        tower.register_forward_pre_hook(
            lambda _, given, named: images.append(len(named["grid_thw"])), with_kwargs=True
        )
    scores = scores_everywhere(made, shard_of(made))
    scored = list(images)
    lr = OPTIMIZER["lr"]
    supervised = made.step(shard_of(made), lr).report
    policy = made.step(shard_of(made, objective="policy"), lr).report
    weights = {
        name: tensor.detach().float().clone().contiguous()
        for bucket in made.buckets()
        for name, tensor in bucket
    }
    sent = [name for bucket in made.policy.buckets_for_engines() for name, _ in bucket]
    if rank == 0:
        save_file(weights, save)
    made.close()
    return {
        "scores": scores,
        "reports": [supervised, policy],
        "sent": sent,
        "images_scored": scored,
        "images": images,
    }


def vision_gradients(
    *, rank: int, size: int, port: int, model: str, layout: dict, save: str
) -> list[torch.Tensor]:
    """Logits of each of ROWS, and gradients of the supervised loss under Hugging Face's names, to
    `save`; of one rank."""
    from milescli.backends.megatron.state.gathering import hf_buckets

    made = seeing_trainer(rank=rank, size=size, port=port, model=model, layout=layout)
    logits = []

    def keep(hidden, microbatch) -> torch.Tensor:
        logits.append(made.policy.passes._head(hidden[0]).logits().float().clone())
        return logits[-1].sum()

    for row in SQUARE_ROWS if made.policy.facts.vision.tower == "siglip" else ROWS:
        own = made.learner._on_rank(shard_of(made, rows=[row]))
        with torch.no_grad():
            made.policy.passes._run(own.microbatches, keep, forward_only=True)
    made.step(shard_of(made), None)
    of_weights = [
        replace(weight, parameter=weight.parameter.main_grad) for weight in made.policy.weights
    ]
    buckets = hf_buckets(of_weights, made.policy.table, mesh=made.mesh, bucket_bytes=2**30)
    save_file({name: grad.contiguous() for bucket in buckets for name, grad in bucket}, save)
    made.close()
    return logits


def vision_goes_on(
    *,
    rank: int,
    size: int,
    port: int,
    model: str,
    layout: dict,
    vision: str,
    save: str = "",
    load: str = "",
) -> dict:
    """A step that is saved, or loaded, and the next one: scores before it, and its report."""
    world = {"rank": rank, "size": size, "port": port, "model": model, "layout": layout}
    made = seeing_trainer(vision=vision, **world)
    if load:
        made.load(load)
    else:
        made.step(shard_of(made), OPTIMIZER["lr"])
        made.save(save, True)
        made.step(shard_of(made), OPTIMIZER["lr"])
        made.finish_save()
        made.load(save)
    scores = scores_everywhere(made, shard_of(made))
    report = made.step(shard_of(made, objective="policy"), OPTIMIZER["lr"]).report
    result = {"scores": scores, "report": report, "checksums": made.parameter_checksums()}
    made.close()
    return result
