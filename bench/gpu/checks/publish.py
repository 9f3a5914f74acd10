"""Weights from a trainer to the engine on the same device: are they there bit for bit, and how many
bytes a second against a plain copy on the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import torch
from lines import Bound, Line
from planning import size_of_weight, time_model, work_of
from rig import address_of, engine, started
from shapes import write_model
from timing import seconds_of

from checks import Visit
from milescli.core.types import WeightVersion
from milescli.core.units import MIB
from milescli.doctor.tiny_trainer import start_trainer, take_step
from milescli.plan.memory import bucket_bytes
from milescli.plan.types import EngineLayout, TrainerLayout

REPEATS = 3


def measure(visit: Visit) -> Iterator[Line]:
    """See the module."""
    folder, weights = write_model("qwen3-1.7b", visit)
    server = engine(visit, folder)
    with started(server):
        trainer = start_trainer(folder, visit.device)
        try:
            bucket = bucket_bytes(trainer.recipe.weights.bucket_mib, on_cpu=visit.device == "cpu")
            size = weights.num_parameters * size_of_weight(visit)
            trainer.connect_engines([address_of(server)])
            trainer.publish(WeightVersion(1))
            seconds = []
            for number in range(REPEATS):
                begun = time.perf_counter()
                trainer.publish(WeightVersion(2 + number))
                seconds.append(time.perf_counter() - begun)
            taken = statistics.median(seconds)
            planned = time_model(weights).publish_seconds(
                TrainerLayout(), EngineLayout(), work_of(visit), shared=True
            )
            yield Line(
                name="publish",
                measured=size / taken / 1e9,
                predicted=size / planned / 1e9,
                unit="GB/s",
                note=f"{size / 1e9:.2f} GB in buckets of {bucket // MIB} MiB; predicted: "
                "the planner's",
                figures={
                    "publish_s": taken,
                    "size_bytes": size,
                    "num_buckets": -(-size // bucket),
                },
            )
            take_step(trainer)
            trainer.publish(WeightVersion(9))
            trainer.verify()  # raises where a bit differs
            yield Line(
                name="verify",
                measured=1,
                predicted=1,
                unit="of 1: every weight arrived bit for bit after an optimizer step",
                bound=Bound(kind="equal"),
            )
        finally:
            trainer.close()
    data = torch.empty(size, dtype=torch.uint8, device=visit.torch_device)
    copied = torch.empty_like(data)
    copy_s = seconds_of(lambda: copied.copy_(data), visit, repeats=5)
    yield Line(
        name="beside_device_copy",
        measured=copy_s / taken,
        unit="x a copy of the same bytes on the device",
        note="a publish gathers, flattens, hands over, and the engine copies into place",
        figures={"copy_s": copy_s},
    )
