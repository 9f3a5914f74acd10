"""A teacher behind a real engine says what its model says in transformers, and is refused where it
reads other tokens."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from milescli.backends.sglang.client.teacher import ServedTeachers, with_hint
from milescli.core.errors import DataError, EndpointError, RecipeError
from milescli.core.types import Prompt
from milescli.data.chat_template import RAW
from milescli.data.tokenizer import ChatTokenizer, load_tokenizer
from milescli.models.scratch import make_model
from milescli.recipe.model import ScratchModel
from milescli.recipe.schema import Recipe
from milescli.train.objectives.supervised import teacher_streams
from milescli.train.streams import Stream
from tests.backends.sglang.conftest import KEY, VOCAB, Service, write_tokenizer
from tests.backends.sglang.weights.sending import TOKENS
from tests.data.chat_templates import CHATML, tokenizer_of
from tests.endpoint_server import Asked, Reply, quick_retries, serving
from tests.samples import make_trajectory

__all__ = ["quick_retries"]
pytestmark = pytest.mark.engine
TOP_K = 5
WITHIN = 1e-5


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the environment, where the recipe says."""
    monkeypatch.setenv("TEACHER_KEY", KEY)


def _served(url: str, *, kl: str) -> ServedTeachers:
    distill = {
        "teachers": [{"url": url}],
        "kl": kl,
        "top_k": TOP_K,
        "server": {"api_key_env": "TEACHER_KEY", "retries": 1},
    }
    return ServedTeachers(Recipe.model_validate({"train": {"distill": distill}}))


def _logprobs(model: torch.nn.Module) -> torch.Tensor:
    """[len(TOKENS) - 1, VOCAB] by transformers."""
    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits[0, :-1].log_softmax(-1)


def _streams(service: Service, *, kl: str) -> dict[str, np.ndarray]:
    """Of what the engine says of TOKENS."""

    async def asked() -> dict[str, np.ndarray]:
        teachers = _served(service.engine.url, kl=kl)
        prompt = Prompt(index=0, token_ids=TOKENS[:2], text="", label=None)
        line = make_trajectory(TOKENS[:2], TOKENS[2:])
        (taught,) = await teachers.with_predictions(prompt, [line])
        assert taught.token_ids == line.token_ids and taught.teacher is not None
        return teacher_streams(taught.teacher)

    return asyncio.run(asked())


def test_it_says_how_likely_each_token_is(service: Service) -> None:
    streams = _streams(service, kl="sampled")
    assert set(streams) == {Stream.TEACHER}
    wanted = _logprobs(service.model).gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0]
    assert streams[Stream.TEACHER][1:] == pytest.approx(wanted.numpy(), abs=WITHIN)


def test_it_names_the_likeliest_tokens(service: Service) -> None:
    streams = _streams(service, kl="reverse")
    values, ids = _logprobs(service.model).topk(TOP_K)
    assert streams[Stream.CANDIDATES].shape == (len(TOKENS), TOP_K)
    assert streams[Stream.CANDIDATES][1:].tolist() == ids.tolist()
    assert streams[Stream.TEACHER][1:] == pytest.approx(values.numpy(), abs=WITHIN)


def _of_bytes() -> ChatTokenizer:
    return tokenizer_of(CHATML.template, special=CHATML.special, eos=CHATML.eos)


def _tokens(tokenizer: ChatTokenizer, text: str) -> list[int]:
    return tokenizer.encode_text(tokenizer.render([{"role": "user", "content": text}]))


@pytest.mark.parametrize("kl", ["sampled", "reverse"])
def test_a_hint_is_read_by_the_teacher_alone_and_its_words_are_of_the_response(
    kl: str,
) -> None:
    def says(asked: Asked, number: int) -> Reply:
        """Of each token, minus a hundredth of its place, and minus itself."""
        ids = asked.body["input_ids"]
        told.append(ids)
        rows = [[None, ids[0], None], *([-n / 100, ids[n], None] for n in range(1, len(ids)))]
        tops = [None, *([[-n / 100, k, None] for k in range(TOP_K)] for n in range(1, len(ids)))]
        return Reply({"meta_info": {"input_token_logprobs": rows, "input_top_logprobs": tops}})

    told, tokenizer = list[list[int]](), _of_bytes()
    prompt = Prompt(
        index=7,
        token_ids=_tokens(tokenizer, "1 + 2?"),
        text="1 + 2?",
        label="3 {demonstration}",
        source=None,
    )
    response = tokenizer.encode_continuation("It is 3.")
    line = make_trajectory(prompt.token_ids, response)

    async def taught(url: str, hint: str) -> Any:
        distill = {"teachers": [{"url": url, "hint": hint}], "kl": kl, "top_k": TOP_K}
        recipe = Recipe.model_validate({"train": {"distill": distill}})
        return await ServedTeachers(recipe, tokenizer).with_predictions(prompt, [line])

    with serving(says) as server:
        (done,) = asyncio.run(taught(server.url, " (It is {label}.)"))
        with pytest.raises(DataError, match="no demonstration"):
            asyncio.run(taught(server.url, "{demonstration}"))
    shown = _tokens(tokenizer, "1 + 2? (It is 3 {demonstration}.)")
    assert told == [[*shown, *response]] and done.token_ids == line.token_ids
    said = teacher_streams(done.teacher)[Stream.TEACHER]
    known, places = len(prompt.token_ids), range(len(shown), len(shown) + len(response))
    assert len(said) == known + len(response) and not said[:known].any()
    wanted = np.array([-n / 100 for n in places], np.float32)
    assert said[known:].reshape(len(response), -1)[:, 0] == pytest.approx(wanted)


def test_a_prompt_that_a_hint_cannot_follow_is_refused() -> None:
    other = Prompt(index=7, token_ids=[5, 6], text="1 + 2?")
    with pytest.raises(DataError, match="prompt 7 cannot be shown"):
        with_hint(other, " Think.", _of_bytes())


def _meet(url: str, tokenizer: ChatTokenizer, *, num_tokens: int = VOCAB) -> list[str]:
    return asyncio.run(_served(url, kl="sampled").meet(tokenizer, num_tokens))


def test_the_same_tokens_are_taken_and_others_are_refused(service: Service, tmp_path: Path) -> None:
    url, folder = service.engine.url, service.engine.spec.model_dir
    own = load_tokenizer(folder, chat_template=RAW)
    (met,) = _meet(url, own)
    assert met == f"{url} {folder}"
    make_model(ScratchModel(), tmp_path, 0)
    with pytest.raises(RecipeError, match="another tokenizer") as refused:
        _meet(url, load_tokenizer(tmp_path, chat_template=RAW), num_tokens=200)
    assert "for the policy" in refused.value.why and "there" in refused.value.why


def test_a_wrong_key_is_told(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_KEY", "another")
    with pytest.raises(EndpointError, match="HTTP 401"):
        _meet(service.engine.url, load_tokenizer(service.engine.spec.model_dir, chat_template=RAW))


@pytest.mark.parametrize(
    "reply",
    [
        {"choices": []},
        {"meta_info": {}},
        {"meta_info": {"input_token_logprobs": [[None, 1, None], [-1.0, 2, None]]}},
        [],
    ],
    ids=["another protocol", "nothing", "too few", "no object"],
)
def test_what_is_no_reply_of_sglang_is_refused(
    reply: object, quick_retries: None, tmp_path: Path
) -> None:
    def says(asked: Asked, number: int) -> Reply:
        return Reply(reply)

    write_tokenizer(tmp_path)
    with serving(says) as server:
        with pytest.raises(EndpointError, match="none of SGLang's"):
            asyncio.run(_served(server.url, kl="sampled").teachers[0].score(TOKENS))
        with pytest.raises(EndpointError, match="none of SGLang's"):
            _meet(server.url, load_tokenizer(tmp_path, chat_template=RAW))
