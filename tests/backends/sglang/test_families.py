"""Families on real engines: log-probs and chosen experts are those of transformers, at the start
and after new weights were sent.

Four families here; `MILES_SERVED=llama,gpt-oss pytest ...` tries the tiny models of tests/families
whose names begin so, `MILES_SERVED=` every one that a CPU serves.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file

from milescli.backends.sglang.client.http import EngineHttp
from milescli.backends.sglang.inside.routing import request_id
from milescli.backends.sglang.launch.servable import fault_of_record, servable_on_cpu
from milescli.backends.sglang.launch.spec import EngineSpec
from milescli.backends.sglang.weights.channels import TensorChannel
from milescli.core.types import EngineAddress
from milescli.models import load_facts, parse_facts
from milescli.platform.ports import free_ports
from tests.backends.sglang.warm_engines import engine_of
from tests.buckets import into_buckets
from tests.families.cases import ALL, SERVED_TOO
from tests.forked import run_module

pytestmark = pytest.mark.engine
CASES = {**ALL, **SERVED_TOO}
LARGEST = 1e-5
"""Difference of log-probs; or twice what transformers' own move by when every weight moves by one
rounding, where that is more (gated delta nets with steep random weights)."""
PROMPTS = [
    [5, 9, 100, 3, 77, 42, 8],
    [17, 4, 4, 90, 12, 60, 61, 62, 63, 64, 65, 2, 33, 34, 35, 36, 37, 38, 39, 40],
    [23],
]
"""Shorter and longer than the windows of the tiny models."""
TOKENS = 16
BUCKET_BYTES = 9000
"""Ends between tensors that belong together."""


def wanted() -> list[str]:
    if "MILES_SERVED" not in os.environ:
        return ["deepseek-v3-yarn", "glm4-moe", "gpt-oss", "qwen3-5-moe"]
    chosen = os.environ["MILES_SERVED"].split(",")
    named = [
        name
        for name, case in CASES.items()
        if case.logits and any(name.startswith(start) for start in chosen)
    ]
    return [name for name in named if servable_on_cpu(parse_facts(CASES[name].config))[0]]


def other_weights(folder: Path, target: Path) -> None:
    """The same model with other numbers."""
    target.mkdir()
    for path in folder.glob("*.json"):
        shutil.copyfile(path, target / path.name)
    torch.manual_seed(1)
    for path in folder.glob("*.safetensors"):
        tensors = {
            name: tensor + 0.1 * tensor.std() * torch.randn_like(tensor)
            for name, tensor in load_file(path).items()
        }
        save_file(tensors, target / path.name, metadata={"format": "pt"})


class Engine:
    """One engine on a tiny model."""

    def __init__(self, folder: Path) -> None:
        self.facts = load_facts(folder)
        self.spec = EngineSpec(
            model_dir=folder,
            tokenizer_dir=None,
            device_kind="cpu",
            precision="fp32",
            port=free_ports(1)[0],
            log_path=folder / "engine.log",
            max_total_tokens=8192,
            context_length=256,
            return_routed_experts=fault_of_record(self.facts) is None,
            extra_args=("--chunked-prefill-size", "8"),
        )

    @property
    def address(self) -> EngineAddress:
        return EngineAddress(url=self.spec.url, tp=1, sharing_ranks=[0])

    def responses(self, temperature: float) -> list[dict]:
        """To all prompts at once."""

        async def generate() -> list[dict]:
            http = EngineHttp([self.address], caller="the test")
            try:
                return await asyncio.gather(
                    *(self._response(http, prompt, temperature) for prompt in PROMPTS)
                )
            finally:
                await http.close()

        return asyncio.run(generate())

    async def _response(self, http: EngineHttp, prompt: list[int], temperature: float) -> dict:
        sampling = {
            "max_new_tokens": TOKENS,
            "temperature": temperature,
            "ignore_eos": True,
            "sampling_seed": 7,
        }
        body = {
            "input_ids": prompt,
            "sampling_params": sampling,
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        if self.spec.return_routed_experts:  # else SGLang wants one for each request
            body["rid"] = request_id(0)
        reply = await http.order(self.address, "/generate", body, timeout_s=60)
        meta = reply["meta_info"]
        given, made = meta["input_token_logprobs"], meta["output_token_logprobs"]
        tokens = [*prompt, *(entry[1] for entry in made)]
        experts = None
        if meta.get("routed_experts"):
            flat = numpy.frombuffer(base64.b64decode(meta["routed_experts"]), dtype=numpy.uint8)
            experts = flat.reshape(len(tokens) - 1, self.facts.num_layers, self.facts.topk)
        return {
            "tokens": tokens,
            "logprobs": [entry[0] for entry in (*given[1:], *made)],
            "experts": experts,
            "record": meta.get("routed_experts"),
        }

    def send(self, folder: Path) -> None:
        """As a trainer does, and verify that every parameter arrived. MTP layers are not sent."""
        channel = TensorChannel(timeout_s=60)
        channel.open([self.address])
        named = [
            pair
            for path in sorted(folder.glob("*.safetensors"))
            for pair in load_file(path).items()
        ]
        mtp = f"model.layers.{self.facts.num_layers}."
        kept = [(name, tensor) for name, tensor in named if not name.startswith(mtp)]
        channel.send(into_buckets(iter(kept), BUCKET_BYTES))
        channel.verify(into_buckets(iter(kept), BUCKET_BYTES))
        channel.close()


@pytest.fixture(scope="module")
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict]:
    """Of the families whose tests run: name -> {"greedy", "sampled", "updated": [(response, what
    transformers says: log-probs, moved, experts)]}, or {"error"}."""
    root = tmp_path_factory.mktemp("served")
    names = [
        name
        for name in wanted()
        if any(item.nodeid.endswith(f"after_new_weights[{name}]") for item in request.session.items)
    ]
    run_module("tests.families.making", str(root / "models"), *names)
    by_name: dict[str, dict] = {}
    jobs = []
    for name in names:
        folder, other = root / "models" / name, root / f"{name} other"
        other_weights(folder, other)
        try:
            by_name[name] = responses_of(folder, other)
        except Exception as error:
            by_name[name] = {"error": error}
            continue
        for kind, responses in by_name[name].items():
            rows = [response["tokens"] for response in responses]
            out = root / f"{name} {kind}.safetensors"
            jobs.append(
                {
                    "folder": str(other if kind == "updated" else folder),
                    "rows": rows,
                    "out": str(out),
                }
            )
    (root / "request.json").write_text(json.dumps({"jobs": jobs}))
    run_module("tests.backends.sglang.witness", str(root / "request.json"))
    replayed(root, by_name)
    for name, kinds in by_name.items():
        for kind in kinds if "error" not in kinds else ():
            said = load_file(root / f"{name} {kind}.safetensors")
            kinds[kind] = [
                (
                    response,
                    said[f"logprobs.{index}"],
                    said[f"moved.{index}"],
                    said.get(f"experts.{index}"),
                )
                for index, response in enumerate(kinds[kind])
            ]
    return by_name


def replayed(root: Path, by_name: dict[str, dict]) -> None:
    """Give each response that was sampled what a trainer says of it that routes as the engine
    did."""
    jobs = []
    for name, kinds in by_name.items():
        if "error" in kinds or kinds["sampled"][0]["experts"] is None:
            continue
        jobs.append(
            {
                "folder": str(root / "models" / name),
                "rows": [response["tokens"] for response in kinds["sampled"]],
                "experts": [response["record"] for response in kinds["sampled"]],
                "shape": list(kinds["sampled"][0]["experts"].shape[1:]),
                "out": str(root / f"{name} replayed.safetensors"),
            }
        )
    (root / "replayed.json").write_text(json.dumps({"jobs": jobs}))
    run_module("tests.backends.sglang.replayer", str(root / "replayed.json"))
    for name in by_name:
        if (said := root / f"{name} replayed.safetensors").exists():
            for index, row in enumerate(by_name[name]["sampled"]):
                row["replayed"] = load_file(said)[f"logprobs.{index}"]


def responses_of(folder: Path, other: Path) -> dict[str, list]:
    engine = Engine(folder)
    server = engine_of(engine.spec)
    server.start()
    try:
        server.wait_ready(400)
        own = {"greedy": engine.responses(0.0), "sampled": engine.responses(1.0)}
        engine.send(other)
        return {**own, "updated": engine.responses(1.0)}
    finally:
        server.stop()


# the engines of all families start for the first: two minutes and a half on a quiet machine
@pytest.mark.parametrize("name", wanted())
def test_logprobs_and_experts_are_those_of_transformers_also_after_new_weights(served, name):
    """And of a trainer that replays the record."""
    if "error" in served[name]:
        raise served[name]["error"]
    facts = parse_facts(CASES[name].config)
    largest, rounding = {}, LARGEST
    for kind, responses in served[name].items():
        for response, logprobs, moved, experts in responses:
            difference = float((torch.tensor(response["logprobs"]) - logprobs).abs().max())
            largest[kind] = max(largest.get(kind, 0.0), difference)
            rounding = max(rounding, 2 * float((moved - logprobs).abs().max()))
            if "replayed" in response:
                gap = (torch.tensor(response["logprobs"]) - response["replayed"]).abs().max()
                largest["replayed"] = max(largest.get("replayed", 0.0), float(gap))
            if experts is not None and fault_of_record(facts) is None:
                layers = [layer for layer in range(facts.num_layers) if facts.is_moe_layer(layer)]
                chosen = numpy.sort(response["experts"][:, layers], axis=-1)
                assert numpy.array_equal(chosen, experts[:-1].sort(-1).values.numpy()), (
                    kind,
                    response["tokens"],
                )
    print(
        f"{name}: "
        + ", ".join(f"{kind} {value:.1e}" for kind, value in largest.items())
        + f"; bound {rounding:.1e}"
    )
    assert max(largest.values()) <= rounding, largest
    before, after = served[name]["sampled"][0][1], served[name]["updated"][0][1]
    assert float((before[:6] - after[:6]).abs().max()) > 100 * LARGEST, (
        "the new weights say the same, and prove nothing"
    )
