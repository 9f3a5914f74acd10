"""One real engine of a tiny Qwen3, shared by every test of this folder."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
import torch.distributed as dist

from milescli.backends.sglang.client.fleet import SglangFleet
from milescli.backends.sglang.launch.server import EngineServer
from milescli.backends.sglang.launch.spec import EngineSpec
from milescli.backends.sglang.weights.channels import TensorChannel
from milescli.core.types import EngineAddress, WeightVersion
from milescli.platform.ports import free_ports
from milescli.weights.base import Bucket, WeightChannel
from tests.backends.sglang.warm_engines import engine_of
from tests.backends.sglang.weights.sending import weights

os.environ.setdefault("MC_FORCE_TCP", "1")  # before any process that engines are forked from
VOCAB = 300
EOS = 1
HOST = "127.0.0.2"
"""Where engines listen: another loopback address than the usual, so that what listens elsewhere is
seen."""
KEY = "key-of-this-test"
MOMENTS_S = (0.2, 0.1, 0.05, 0.4, 0.02, 0.2, 0.8, 1.6, 4.0)
"""After which a pause is tried until it falls into a response: a busy machine begins that later,
and a test that was kept from running finds it ended."""


def write_tokenizer(folder: Path) -> None:
    """Token i reads ` t{i}`; pad, end and unknown come first."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = {"<pad>": 0, "<eos>": EOS, "<unk>": 2} | {
        f"t{index}": index for index in range(3, VOCAB)
    }
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    import transformers

    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    fast.save_pretrained(folder)


def make_qwen3(folder: Path, *, seed: int = 0, tie_word_embeddings: bool = True):
    """A tiny Qwen3 with large random weights, so that its distributions are not flat; saved, and
    returned."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=tie_word_embeddings,
        bos_token_id=0,
        eos_token_id=EOS,
        pad_token_id=0,
        initializer_range=0.15,
    )
    model = transformers.Qwen3ForCausalLM(config).eval()
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model


def make_qwen3_moe(folder: Path, **changed: object):
    """The same with experts, but for what is `changed` in its config; without a tokenizer."""
    import transformers

    torch.manual_seed(1)
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": EOS,
        "pad_token_id": 0,
        "initializer_range": 0.15,
        **changed,
    }
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**settings)).eval()
    model.save_pretrained(folder)
    return model


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What the tests hold."""

    engine: EngineServer
    model: torch.nn.Module
    """The same weights in transformers."""

    @property
    def address(self) -> EngineAddress:
        """As fleet and trainer know the engine."""
        spec = self.engine.spec
        return EngineAddress(
            url=spec.url,
            name=spec.name,
            tp=spec.tp,
            sharing_ranks=[0] * spec.tp,
            api_key=spec.api_key,
            log_path=spec.log_path,
            has_own_draft=spec.speculation is not None and spec.speculation.has_own_weights,
        )

    def run(self, test: Callable[[SglangFleet], Awaitable[object]], **options: object):
        """Run one coroutine with a fleet of its own."""

        async def with_fleet():
            fleet = SglangFleet(
                engines=[self.address],
                response_timeout_s=60,
                order_timeout_s=120,
                **options,
            )
            try:
                return await test(fleet)
            finally:
                await fleet.close()

        return asyncio.run(with_fleet())

    def publish(self, channel: WeightChannel, buckets: Iterator[Bucket], *, version: int) -> None:
        """As a run does: the fleet is paused, and resumed with the version afterwards."""

        async def send(fleet: SglangFleet) -> None:
            await fleet.pause()
            await asyncio.to_thread(channel.send, buckets)
            await fleet.resume(WeightVersion(version))

        self.run(send)


def start_service(
    folder: Path,
    model: torch.nn.Module,
    *,
    log_dir: Path | None = None,
    extra_env: Mapping[str, str] = MappingProxyType({}),
    is_forked: bool = True,
    **options: object,
) -> Service:
    """An engine on that folder, stopped where it does not start. `is_forked`: else it is a process
    that was started as itself."""
    log_dir = log_dir or folder
    spec = EngineSpec(
        model_dir=folder,
        tokenizer_dir=folder,
        device_kind="cpu",
        precision="fp32",
        host=HOST,
        port=free_ports(1, host=HOST)[0],
        log_path=log_dir / "engine.log",
        context_length=1024,
        api_key=KEY,
        max_total_tokens=65_536,
        extra_env={"GLOO_SOCKET_IFNAME": "lo", **extra_env},
        **options,
    )
    engine = engine_of(spec) if is_forked else EngineServer(spec)
    try:
        engine.start()
        engine.wait_ready(400)
    except BaseException:
        engine.stop()
        raise
    return Service(engine=engine, model=model)


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Holds the weights of its model; who sends others takes `weights_restored` too."""
    folder = tmp_path_factory.mktemp("qwen3")
    running = start_service(folder, make_qwen3(folder))
    yield running
    running.engine.stop()


@pytest.fixture
def weights_restored(service: Service) -> Iterator[None]:
    """The shared engine holds its model's weights again afterwards, whatever came of the test."""
    yield
    channel = TensorChannel(timeout_s=60)
    channel.open([service.address])
    service.publish(channel, weights(service.model), version=0)
    channel.close()


@pytest.fixture(scope="module")
def one_rank_trainer() -> Iterator[None]:
    """This process is a trainer of one rank."""
    made_here = not dist.is_initialized()
    if made_here:
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{free_ports(1)[0]}", rank=0, world_size=1
        )
    yield
    if made_here:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def keeping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The model of `service`, on an engine of the file's own that keeps prefixes."""
    folder = tmp_path_factory.mktemp("keeping")
    made = start_service(folder, make_qwen3(folder), name="keeping", prefix_cache=True)
    yield made
    made.engine.stop()
