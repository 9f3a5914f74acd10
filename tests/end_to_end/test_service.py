"""`miles serve --recipe`, with real Ray, SGLang and Megatron-Core on a CPU: clients train and
sample, each as if it were alone, and go on after the server was killed."""

from __future__ import annotations

import json
import select
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from milescli.data.scratch_tokenizer import make_scratch_tokenizer
from milescli.models import scratch
from milescli.recipe.model import ScratchModel
from tests.end_to_end.runs import Workplace, processes_of_run, wait_until_gone
from tests.service_client import Client, Failed, Model, datum
from tests.waiting import until

RECIPE = """\
name: shared
model: {path: base}
data: {prompts: task:sums, max_prompt_tokens: 48}
rollout: {max_response_tokens: 16}
machine: {cpu_threads: 1, start_timeout_s: 480, step_timeout_s: 120}
fault: {max_restarts: 50}
"""
KEYS = {"alice": "tml-alice-0123456789abcdef", "bob": "tml-bob-0123456789abcdef"}
LINES = [[10, 20, 30, 40, 50, 60, 70], [11, 21, 31, 41]]
WEIGHTS = [[1.0, 0.5, 0.0, 1.0, 2.0, 1.0], [1.0, 1.0, 0.25]]
ADAM = {"learning_rate": 0.02, "beta1": 0.9, "beta2": 0.95, "eps": 1e-3, "weight_decay": 0.01}


@dataclass
class Server:
    """A service that runs."""

    workplace: Workplace
    process: subprocess.Popen[str]
    url: str
    folder: Path

    def client(self, tenant: str) -> Client:
        """A new client of a tenant."""
        return Client(self.url, KEYS[tenant])

    def adapter(self, path: str) -> dict[str, torch.Tensor]:
        """Matrices of what was saved for sampling."""
        model, kind, name = path.removeprefix("tinker://").split("/")
        folder = self.folder / "states" / model.replace(":", "-") / kind / name
        return load_file(folder / "adapter_model.safetensors")


def _start(workplace: Workplace, *options: str) -> Server:
    command = ("serve", "--recipe", "shared.yaml", "--lora", "4", "--port", "0")
    process = workplace.start(*command, "--keys", "keys", "--json", *options)
    out = process.stdout
    assert out is not None
    until(lambda: select.select([out], [], [], 0)[0], "a line of `miles serve`", within_s=480)
    line = out.readline()
    assert line, process.communicate(timeout=300)
    told = json.loads(line)
    assert told["base_url"].startswith("http://127.0.0.1:") and "api_key" not in told
    return Server(workplace, process, told["base_url"], Path(told["folder"]))


@pytest.fixture(scope="module")
def server(workplace: Workplace) -> Iterator[Server]:
    """One service for all tests of this file."""
    shape = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    folder = workplace.folder / "base"
    make_scratch_tokenizer(["What is 47 + 38? #### 85"] * 3, 300, folder)
    model = ScratchModel(**shape, ffn_hidden_size=128, vocab_size=300)
    scratch.make_model(model, folder, 0)
    (workplace.folder / "shared.yaml").write_text(RECIPE)
    keys = workplace.folder / "keys"
    keys.write_text("".join(f"{name} {key}\n" for name, key in KEYS.items()))
    keys.chmod(0o600)
    made = _start(workplace)
    yield made
    _stop(made)


def _stop(server: Server) -> None:
    processes = processes_of_run(server.process.pid)
    server.process.send_signal(signal.SIGINT)
    ended = server.workplace.finish(server.process, timeout_s=300)
    assert ended.code == 0, ended
    assert not wait_until_gone(processes)


def _data(scale: float = 1.0) -> list[Any]:
    return [
        datum(line, weights=[scale * weight for weight in weights])
        for line, weights in zip(LINES, WEIGHTS, strict=True)
    ]


def _train(
    models: list[tuple[Model, float]], harm: Callable[[], None] | None = None
) -> list[list[Any]]:
    """Three steps of each, whose requests come in turns: what each was told. `harm` is done while
    passes are under way, and while gradients wait for their step."""
    told: list[list[Any]] = [[] for _ in models]
    for step in range(3):
        passes = [
            [model.learn(_data(scale)[:1]), model.learn(_data(scale)[1:])]
            for model, scale in models
        ]
        if harm is not None and step > 0:
            for (model, _), numbers in zip(models, passes, strict=True):
                for number in numbers if step == 2 else ():
                    model.client.result(number)
            harm()
        steps = [model.begin("optim_step", adam_params=ADAM) for model, _ in models]
        for (model, _), own, numbers, step in zip(models, told, passes, steps, strict=True):
            own += [model.client.result(number) for number in [*numbers, step]]
    return told


def test_clients_that_train_at_once_are_each_as_if_alone(server: Server) -> None:
    base = str(server.workplace.folder / "base")
    alone = server.client("alice").model(base, seed=1)
    (told_alone,) = _train([(alone, 1.0)])
    first, second = (
        server.client("alice").model(base, seed=1),
        server.client("bob").model(base, seed=2),
    )
    told, others = _train([(first, 1.0), (second, 3.0)])
    assert told == told_alone and others != told
    assert told[0]["metrics"]["loss:sum"] > told[-3]["metrics"]["loss:sum"], "it learns"
    own, its = server.adapter(first.publish("end")), server.adapter(alone.publish("end"))
    assert own.keys() == its.keys()
    assert all(torch.equal(own[key], its[key]) for key in own)
    assert all(tensor.abs().max() > 0 for tensor in own.values())


def _hit(server: Server, signal_number: int) -> None:
    """Harm the last of the trainer's ranks, which all clients have."""
    ranks = [
        process
        for process in processes_of_run(server.process.pid)
        if any("trainer-rank" in file.path for file in process.open_files())
    ]
    ranks[-1].send_signal(signal_number)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_rank_of_the_trainer_that_is_lost_changes_nothing(
    server: Server, how: signal.Signals
) -> None:
    base = str(server.workplace.folder / "base")
    models = [(server.client("alice").model(base, seed=1), 1.0) for _ in range(2)]
    unhurt, path = _train(models[:1]), models[0][0].publish("end")
    away = server.client("bob").model(base, seed=2)
    before = away.client.result(away.learn(_data(3.0)))
    assert _train(models[1:], lambda: _hit(server, how)) == unhurt
    own, its = server.adapter(models[1][0].publish("end")), server.adapter(path)
    assert all(torch.equal(own[key], its[key]) for key in own)
    again = server.client("bob").model(base, seed=2)
    assert again.client.result(again.learn(_data(3.0))) == before
    assert again.step(**ADAM) == away.step(**ADAM), "with the gradients that it had"
    assert again.logprobs(_data()) == away.logprobs(_data())


def test_a_step_is_that_of_pytorch_and_peft(server: Server) -> None:
    from peft import PeftModel, get_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    base = server.workplace.folder / "base"
    model = server.client("alice").model(str(base), seed=3)
    folder = server.folder / "states" / model.id.replace(":", "-") / "sampler_weights"
    model.publish("start")
    theirs = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        folder / "start",
        is_trainable=True,
    )
    trained = [parameter for parameter in theirs.parameters() if parameter.requires_grad]
    adam = torch.optim.AdamW(
        trained,
        lr=ADAM["learning_rate"],
        betas=(ADAM["beta1"], ADAM["beta2"]),
        eps=ADAM["eps"],
        weight_decay=ADAM["weight_decay"],
    )
    for number in range(2):
        told = model.client.result(model.learn(_data()))
        clip = 0.0 if number == 0 else 1.0
        norm = model.step(**ADAM, grad_clip_norm=clip)["metrics"]["grad_norm:mean"]
        adam.zero_grad()
        loss = torch.zeros(())
        for line, weights, output in zip(LINES, WEIGHTS, told["loss_fn_outputs"], strict=True):
            logits = theirs(torch.tensor([line[:-1]])).logits[0].log_softmax(-1)
            logprobs = logits[torch.arange(len(line) - 1), torch.tensor(line[1:])]
            loss = loss - (logprobs * torch.tensor(weights)).sum()
            close = torch.tensor(output["logprobs"]["data"])
            torch.testing.assert_close(close, logprobs.detach(), rtol=1e-5, atol=1e-5)
        loss.backward()
        whole = torch.nn.utils.clip_grad_norm_(trained, clip or float("inf"))
        adam.step()
        assert told["metrics"]["loss:sum"] == pytest.approx(float(loss.detach()), rel=1e-5)
        assert norm == pytest.approx(float(whole), rel=1e-4)
        own = server.adapter(model.publish(f"step-{number}"))
        for name, tensor in get_peft_model_state_dict(theirs).items():
            torch.testing.assert_close(own[name], tensor.detach(), rtol=1e-3, atol=1e-5)


def test_a_layout_of_several_ranks_changes_nothing(server: Server) -> None:
    """Also where one of them is lost, and each adapter is written after every pass."""
    layout = ("--set", "parallel.tp=2", "--set", "parallel.dp=2", "--name", "spread")
    spread = _start(server.workplace, *layout, "--set", "fault.kept_gib=1e-9")
    told = []
    for each in (server, spread):
        model = each.client("alice").model(str(server.workplace.folder / "base"), seed=12)
        (said,) = _train([(model, 1.0)])
        path = model.save("spread")
        again = each.client("alice").model_from(path, optimizer=True)
        told.append([*(one["metrics"] for one in said), model.logprobs(_data())[0]])
        assert again.logprobs(_data()) == model.logprobs(_data())
    for one, other in zip(*told, strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    models = [spread.client("bob").model(str(server.workplace.folder / "base"), seed=13)]
    models.append(spread.client("bob").model(str(server.workplace.folder / "base"), seed=13))
    unhurt = _train([(models[0], 1.0)])
    assert _train([(models[1], 1.0)], lambda: _hit(spread, signal.SIGKILL)) == unhurt
    own, its = (spread.adapter(model.publish("end")) for model in models)
    assert all(torch.equal(own[key], its[key]) for key in own)
    _stop(spread)


def test_engines_sample_by_the_weights_that_a_sampler_was_made_of(server: Server) -> None:
    client, base = server.client("bob"), str(server.workplace.folder / "base")
    model, prompt = client.model(base, seed=4), LINES[0][:4]
    paths = []
    for number in range(10):  # more than the engines hold at a time
        client.result(model.learn(_data()))
        model.step(**ADAM)
        paths.append(model.publish(f"at-{number}"))
    said = client.sample(client.sampler(paths[-1]), prompt, max_tokens=5, seed=7)
    again = client.sample(client.sampler(paths[-1]), prompt, max_tokens=5, seed=7)
    assert [one["tokens"] for one in said["sequences"]] == [
        one["tokens"] for one in again["sequences"]
    ]
    for sequence in said["sequences"]:
        (logprobs,) = model.logprobs([datum([*prompt, *sequence["tokens"]])])
        assert logprobs[3:] == pytest.approx(sequence["logprobs"], abs=1e-4)
        assert logprobs[:3] == pytest.approx(said["prompt_logprobs"][1:], abs=1e-4)
    scores = [client.sample(client.sampler(path), prompt, max_tokens=1) for path in paths]
    of_prompts = [tuple(each["prompt_logprobs"][1:]) for each in scores]
    assert len(set(of_prompts)) == len(paths), "each sampler keeps its weights"
    first = client.sample(client.sampler(paths[0]), prompt, max_tokens=1)
    assert tuple(first["prompt_logprobs"][1:]) == of_prompts[0]
    plain = client.sample(client.sampler(), prompt, max_tokens=1)
    untrained = client.model(base, seed=9).logprobs([datum(prompt)])[0]
    assert plain["prompt_logprobs"][1:] == pytest.approx(untrained, abs=1e-4)


def test_what_a_client_may_not_do_is_refused_and_harms_nobody(server: Server) -> None:
    alice, bob = server.client("alice"), server.client("bob")
    base = str(server.workplace.folder / "base")
    with pytest.raises(Failed, match="401"):
        Client(server.url, "tml-somebody-0123456789")
    own = alice.model(base, seed=5)
    path, sampler = own.save("mine"), alice.sampler()
    for refused in (
        lambda: bob.do(
            "load_weights", session_id=bob.session, model_seq_id=9, path=path, optimizer=True
        ),
        lambda: bob.sampler(own.publish("mine")),
        lambda: Model(bob, own.id).step(**ADAM),
        lambda: own.save("../out"),
        lambda: own.save("mine"),
        lambda: alice.model(base, rank=8),
        lambda: alice.model("another"),
        lambda: own.step(learning_rate=-1.0),
        lambda: own.do(
            "forward", forward_input={"data": [datum([1, 2, 999])], "loss_fn": "cross_entropy"}
        ),
        lambda: own.do(
            "forward", forward_input={"data": [datum([1] * 200)], "loss_fn": "cross_entropy"}
        ),
        lambda: own.do("forward", forward_input={"data": [datum([1, 2])], "loss_fn": "gspo"}),
        lambda: alice.sample(sampler, [1, 2, 999]),
        lambda: alice.sample(sampler, [-100, 1]),
        lambda: alice.sample(sampler, [1], stop=[999]),
        lambda: alice.sample(sampler, [1], top_k=0),
    ):
        with pytest.raises(Failed, match=r"400|user"):
            refused()
    assert own.logprobs([datum([1, 2, 3])]) == alice.model(base, seed=5).logprobs(
        [datum([1, 2, 3])]
    )


def test_padded_targets_without_weight_change_nothing(server: Server) -> None:
    model = server.client("alice").model(str(server.workplace.folder / "base"), seed=6)
    line, zeros = LINES[0], [0.0, 0.0, 0.0]
    plain = datum(line, logprobs=[*zeros, -1.0, -2.0, -3.0], advantages=[*zeros, 1.0, 1.0, -1.0])
    padded = json.loads(json.dumps(plain))
    padded["loss_fn_inputs"]["target_tokens"]["data"][:3] = [0, 0, 0]
    for loss in ("importance_sampling", "ppo", "cispo"):
        told = [model.client.result(model.learn([each], loss)) for each in (plain, padded)]
        values = [each["metrics"]["loss:sum"] for each in told]
        assert values[0] == pytest.approx(values[1], rel=1e-5)
        norms = []
        for each in (plain, padded):
            model.step(learning_rate=0.0)
            model.client.result(model.learn([each], loss))
            norms.append(model.step(learning_rate=0.0)["metrics"]["grad_norm:mean"])
        assert norms[0] == pytest.approx(norms[1], rel=1e-4) and norms[0] > 0


def test_an_engine_that_dies_is_replaced_and_holds_all_adapters(server: Server) -> None:
    client, base = server.client("alice"), str(server.workplace.folder / "base")
    samplers = [client.sampler()]
    for seed in (10, 11):
        model = client.model(base, seed=seed)
        client.result(model.learn(_data()))
        model.step(**ADAM)
        samplers.append(client.sampler(model.publish("here")))
    before = [client.sample(each, LINES[0], max_tokens=1) for each in samplers]
    (scheduler,) = (
        one for one in processes_of_run(server.process.pid) if "scheduler" in one.cmdline()[0]
    )
    scheduler.send_signal(signal.SIGKILL)
    model.publish("meanwhile")
    after = [client.sample(each, LINES[0], max_tokens=1) for each in samplers]
    for one, other in zip(before, after, strict=True):
        assert one["prompt_logprobs"][1:] == pytest.approx(other["prompt_logprobs"][1:], abs=1e-4)
    assert len({tuple(each["prompt_logprobs"][1:]) for each in after}) == 3


def test_its_own_client_trains_and_samples(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    tinker = pytest.importorskip("tinker", reason="pip install tinker")
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    service = tinker.ServiceClient(base_url=server.url, api_key=KEYS["alice"])
    base = str(server.workplace.folder / "base")
    training = service.create_lora_training_client(base_model=base, rank=4, seed=1).result()
    types, numbers = tinker.types, list(range(10, 18))
    line = types.Datum(
        model_input=types.ModelInput.from_ints(numbers[:-1]),
        loss_fn_inputs={"target_tokens": numbers[1:], "weights": [1.0] * 7},
    )
    losses = []
    for _ in range(3):
        told = training.forward_backward([line], "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=0.02)).result()
        losses.append(told.result().metrics["loss:sum"])
    assert losses[-1] < losses[0]
    sampling = training.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=4, seed=1)
    prompt = types.ModelInput.from_ints(numbers[:3])
    (sequence,) = sampling.sample(prompt, 1, params).result().sequences
    assert 1 <= len(sequence.tokens) <= 4 and len(sequence.logprobs) == len(sequence.tokens)
    assert training.get_tokenizer().decode(sequence.tokens) is not None
    path = training.save_state("own").result().path
    again = service.create_training_client_from_state_with_optimizer(path).result()
    outputs = [each.forward([line], "cross_entropy").result() for each in (training, again)]
    assert outputs[0].metrics == outputs[1].metrics


def test_a_killed_server_goes_on_from_saved_states(server: Server) -> None:
    client, base = server.client("alice"), str(server.workplace.folder / "base")
    model = client.model(base, seed=8)
    client.result(model.learn(_data()))
    model.step(**ADAM)
    path, sampled = model.save("kept"), model.publish("kept")
    client.result(model.learn(_data()))
    model.step(**ADAM)
    expected = model.logprobs(_data())
    processes = processes_of_run(server.process.pid)
    server.process.send_signal(signal.SIGKILL)
    server.workplace.finish(server.process, timeout_s=300)
    restarted = _start(server.workplace)
    server.process, server.url = restarted.process, restarted.url
    assert not wait_until_gone(processes)
    client = server.client("alice")
    again = client.model_from(path, optimizer=True)
    client.result(again.learn(_data()))
    again.step(**ADAM)
    assert again.logprobs(_data()) == expected, "with the moments that it had"
    fresh = client.model_from(path, optimizer=False)
    client.result(fresh.learn(_data()))
    fresh.step(**ADAM)
    assert fresh.logprobs(_data()) != expected, "its moments begin anew"
    assert client.sample(client.sampler(sampled), [1, 2, 3], max_tokens=2)["sequences"]
    with pytest.raises(Failed, match="you have no state"):
        server.client("bob").model_from(path, optimizer=True)
