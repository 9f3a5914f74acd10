"""A small client of `miles serve --recipe`, in the JSON form of the Tinker API: for tests that run
where the client of its own is not installed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

Json = dict[str, Any]


def datum(token_ids: Sequence[int], **inputs: Sequence[float]) -> Json:
    """A line of tokens, each of which but the first is a target."""
    given = {"target_tokens": {"data": list(token_ids[1:]), "dtype": "int64"}}
    for name, values in inputs.items():
        given[name] = {"data": list(values), "dtype": "float32"}
    return {"model_input": text(token_ids[:-1]), "loss_fn_inputs": given}


def text(token_ids: Sequence[int]) -> Json:
    """A ModelInput."""
    return {"chunks": [{"type": "encoded_text", "tokens": list(token_ids)}]}


class Failed(Exception):
    """A request that the service refused, or that failed."""


@dataclass
class Client:
    """One tenant's connection."""

    url: str
    key: str
    session: str = ""
    _numbers: itertools.count = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.session = self.post("create_session", tags=[], sdk_version="0")["session_id"]

    def post(self, path: str, /, **body: Any) -> Json:
        """What a request brings; Failed where it is refused."""
        reply = httpx.post(
            f"{self.url}/api/v1/{path}", json=body, headers={"X-API-Key": self.key}, timeout=300
        )
        if reply.status_code == 408:
            return {"try_again": True}
        if reply.status_code != 200:
            raise Failed(f"{reply.status_code}: {reply.text}")
        return reply.json()

    def result(self, request_id: str) -> Json:
        """The result of a future."""
        while (found := self.post("retrieve_future", request_id=request_id)).get("try_again"):
            pass
        if "error" in found:
            raise Failed(f"{found['category']}: {found['error']}")
        return found

    def do(self, path: str, /, **body: Any) -> Json:
        """Request and result."""
        return self.result(self.post(path, **body)["request_id"])

    def model(self, base: str, *, rank: int = 4, seed: int = 0) -> Model:
        """A new adapter."""
        config = {"rank": rank, "seed": seed}
        made = self.do(
            "create_model",
            session_id=self.session,
            model_seq_id=next(self._numbers),
            base_model=base,
            lora_config=config,
        )
        return Model(self, made["model_id"])

    def model_from(self, path: str, *, optimizer: bool) -> Model:
        """A new adapter that begins with a saved state."""
        made = self.do(
            "load_weights",
            session_id=self.session,
            model_seq_id=next(self._numbers),
            path=path,
            optimizer=optimizer,
        )
        return Model(self, made["model_id"])

    def sampler(self, path: str | None = None) -> str:
        """A sampler of a saved adapter, or of the base model."""
        return self.post(
            "create_sampling_session",
            session_id=self.session,
            sampling_session_seq_id=next(self._numbers),
            model_path=path,
        )["sampling_session_id"]

    def sample(self, sampler: str, prompt: Sequence[int], **params: Any) -> Json:
        """Two sequences, with the log-probs of the prompt."""
        return self.do(
            "asample",
            sampling_session_id=sampler,
            seq_id=next(self._numbers),
            prompt=text(prompt),
            num_samples=2,
            prompt_logprobs=True,
            sampling_params=params,
        )


@dataclass
class Model:
    """One adapter of a client."""

    client: Client
    id: str
    _numbers: itertools.count = field(default_factory=lambda: itertools.count(1))

    def begin(self, path: str, /, **body: Any) -> str:
        """Begin a request; its id."""
        body = {"model_id": self.id, "seq_id": next(self._numbers), **body}
        return self.client.post(path, **body)["request_id"]

    def do(self, path: str, /, **body: Any) -> Json:
        """Request and result."""
        return self.client.result(self.begin(path, **body))

    def learn(self, data: Sequence[Json], loss: str = "cross_entropy", **config: float) -> str:
        """Begin a forward and backward pass; its id."""
        given = {"data": list(data), "loss_fn": loss, "loss_fn_config": config}
        return self.begin("forward_backward", forward_backward_input=given)

    def logprobs(self, data: Sequence[Json]) -> list[list[float]]:
        """Log-probs of the targets."""
        given = {"data": list(data), "loss_fn": "cross_entropy"}
        told = self.do("forward", forward_input=given)
        return [each["logprobs"]["data"] for each in told["loss_fn_outputs"]]

    def step(self, **params: float) -> Json:
        """An optimizer step."""
        return self.do("optim_step", adam_params=params)

    def save(self, name: str) -> str:
        """Save a training state; its path."""
        return self.do("save_weights", path=name)["path"]

    def publish(self, name: str) -> str:
        """Save for sampling; its path."""
        return self.do("save_weights_for_sampler", path=name)["path"]
