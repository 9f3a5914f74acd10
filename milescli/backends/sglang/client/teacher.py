"""Queries teachers on SGLang servers that are not part of the run."""

from __future__ import annotations

import asyncio
import re
from array import array
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from milescli.backends.sglang.client.reply import image_data, prompt_logprobs
from milescli.core.concurrency import all_or_first_error
from milescli.core.errors import DataError, EndpointError, RecipeError
from milescli.core.types import ImageSpan, Prompt, TeacherTokens, Trajectory
from milescli.data.images import collapsed
from milescli.data.tokenizer import ChatTokenizer
from milescli.recipe.distill import Distill, Teacher, teachers_by_source
from milescli.recipe.schema import Recipe
from milescli.rollout.endpoint import Endpoint

KEY = "train.distill.teachers"
SECTION = "train.distill.server"
MAX_REPLY_BYTES = 256 * 1024**2
"""Largest reply for one trajectory: about 30 bytes for each of a token's most likely tokens."""
NUM_COMPARED = 512
"""Tokens, spread over the vocabulary, whose text must be equal in both tokenizers."""
NUM_SHOWN = 3


class SglangTeacher:
    """Queries one served teacher. Belongs to one event loop."""

    def __init__(self, teacher: Teacher, settings: Distill) -> None:
        """Connect to the teacher. Raises RecipeError if the environment lacks its key."""
        assert teacher.url is not None, "the trainer's ranks hold it"
        self.url = teacher.url.rstrip("/")
        self._topk = 0 if settings.kl == "sampled" else settings.top_k
        self._free = asyncio.Semaphore(settings.server.concurrency)
        self._server = Endpoint(
            caller="the teacher",
            section=SECTION,
            error=EndpointError,
            url=self.url,
            timeout_s=settings.server.timeout_s,
            retries=settings.server.retries,
            api_key_env=settings.server.api_key_env,
            max_reply_bytes=MAX_REPLY_BYTES,
        )

    async def score(
        self, token_ids: Sequence[int], images: Sequence[tuple[ImageSpan, bytes]] = ()
    ) -> TeacherTokens:
        """Return the teacher's log-probs of each token, from one prefill at temperature 1; those of
        image tokens have no meaning. `images`: their positions, and their PNG files. Raises
        EndpointError."""
        shown = {"image_data": image_data(images)} if images else {}
        sent = collapsed(token_ids, [span for span, _ in images])
        reply = await self._read(sent, top_logprobs_num=self._topk, **shown)
        try:
            if not self._topk:
                logprobs = array("f", [0.0, *prompt_logprobs(reply)])
                ids = array("i")
            else:
                rows = reply["meta_info"]["input_top_logprobs"][1:]
                entries = list(chain.from_iterable(rows))
                logprobs = array("f", chain([0.0] * self._topk, (entry[0] for entry in entries)))
                ids = array("i", chain([0] * self._topk, (entry[1] for entry in entries)))
            assert len(logprobs) == len(token_ids) * max(self._topk, 1), "tokens are missing"
        except (KeyError, IndexError, TypeError, AssertionError) as error:
            raise self._unreadable(reply, error) from None
        return TeacherTokens(token_ids=ids.tobytes(), logprobs=logprobs.tobytes(), topk=self._topk)

    async def score_all(self, rows: Sequence[Trajectory]) -> list[TeacherTokens]:
        """Return the teacher's log-probs of each sequence. Raises EndpointError."""
        scores = []
        for row in rows:
            png = {image.sha256: image.png for image in row.images}
            images = [(span, png[span.sha256]) for span in row.image_spans]
            scores.append(self.score(row.token_ids, images))
        return await all_or_first_error(scores)

    async def require_same_tokens(self, tokenizer: ChatTokenizer, *, num_tokens: int) -> None:
        """Compare the teacher's tokenizer with the policy's, whose model knows `num_tokens`. Raises
        RecipeError if one of NUM_COMPARED tokens differs; EndpointError if the teacher does not
        answer, e.g. for a token that it does not know."""
        # of a vocabulary's last token SGLang writes the text of its first
        known = min(num_tokens - 1, len(tokenizer.inner))
        spread = range(0, known, -(-known // NUM_COMPARED))
        ids = sorted({*spread, *filter(known.__gt__, tokenizer.inner.all_special_ids)})
        reply = await self._read(ids, return_text_in_logprobs=True)
        try:
            theirs = [str(entry[2]) for entry in reply["meta_info"]["input_token_logprobs"]]
            assert len(theirs) == len(ids), "tokens are missing"
        except (KeyError, IndexError, TypeError, AssertionError) as error:
            raise self._unreadable(reply, error) from None
        ours = tokenizer.inner.batch_decode([[token] for token in ids])
        apart = [
            f"{token} is {own!r} for the policy, {other!r} there"
            for token, own, other in zip(ids, ours, theirs, strict=True)
            if own != other
        ]
        if apart:
            raise RecipeError(
                f"the teacher at {self.url} has another tokenizer than the policy",
                why=f"{len(apart)} of {len(ids)} tokens that were compared differ: "
                + "; ".join(apart[:NUM_SHOWN]),
                fix=f"name a server of the policy's family in {KEY}",
            )

    async def model(self) -> str:
        """Return the name of the served model; equal names are taken as equal weights."""
        reply = await self._server.get("/get_model_info")
        return str(reply.get("model_path") if isinstance(reply, dict) else reply)

    async def _read(self, token_ids: Sequence[int], **options: Any) -> Any:
        body = {
            "input_ids": list(token_ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": 0,
            **options,
        }
        async with self._free:
            return await self._server.post(body, "/generate")

    def _unreadable(self, reply: Any, error: Exception) -> Exception:
        return self._server.failure(
            f"its reply is none of SGLang's /generate: {error}: {reply!r:.200}",
            f"name an SGLang server in {KEY}: http://HOST:PORT, without /v1",
        )


class ServedTeachers:
    """Implements milescli.rollout.episode.episode.TeacherClient. Belongs to one event loop."""

    def __init__(self, recipe: Recipe, tokenizer: ChatTokenizer | None = None) -> None:
        """Connect to all teachers of the recipe. `tokenizer`: of the policy, for hints."""
        settings = recipe.train.distill
        self.teachers = [SglangTeacher(teacher, settings) for teacher in settings.teachers]
        self._hints = [teacher.hint for teacher in settings.teachers]
        self._tokenizer = tokenizer
        self._by_source = teachers_by_source(settings)

    async def meet(self, tokenizer: ChatTokenizer, num_tokens: int) -> list[str]:
        """Compare the tokenizer of every teacher with the policy's, whose model knows `num_tokens`.
        Return the address and model of each. Raises RecipeError or EndpointError."""
        for teacher in self.teachers:
            await teacher.require_same_tokens(tokenizer, num_tokens=num_tokens)
        return await self.models()

    async def models(self) -> list[str]:
        """Return the address and model of each teacher. Raises EndpointError."""
        return [f"{teacher.url} {await teacher.model()}" for teacher in self.teachers]

    async def with_predictions(
        self, prompt: Prompt, trajectories: Sequence[Trajectory]
    ) -> list[Trajectory]:
        number = self._by_source.get(prompt.source, 0)
        teacher, hint = self.teachers[number], self._hints[number]
        if hint is not None:
            answers = await self._score_with_hint(hint, teacher, prompt, trajectories)
        else:
            shown = [replace(line, images=(*prompt.images, *line.images)) for line in trajectories]
            answers = await teacher.score_all(shown)
        return [
            replace(line, teacher=words) for line, words in zip(trajectories, answers, strict=True)
        ]

    async def _score_with_hint(
        self,
        hint: str,
        teacher: SglangTeacher,
        prompt: Prompt,
        trajectories: Sequence[Trajectory],
    ) -> list[TeacherTokens]:
        """Return the teacher's log-probs of responses to the prompt with the hint: on-policy
        self-distillation if the teacher is the initial policy. The prompt's own tokens get none."""
        assert self._tokenizer is not None, "hints are tokenised"
        hinted = with_hint(prompt, hint, self._tokenizer)
        known = len(prompt.token_ids)
        assert all(line.token_ids[:known].tolist() == prompt.token_ids for line in trajectories)
        rows = [
            replace(line, token_ids=array("i", hinted) + line.token_ids[known:])
            for line in trajectories
        ]
        return [
            _replace_prompt(words, len(hinted), known) for words in await teacher.score_all(rows)
        ]


_FIELD = re.compile(r"\{(label|demonstration)\}")


def with_hint(prompt: Prompt, hint: str, tokenizer: ChatTokenizer) -> list[int]:
    """Return the tokens of the prompt with the hint at the end of its last user message. Raises
    DataError for a prompt to which none can be added."""

    def value_of(named: re.Match[str]) -> str:
        value = getattr(prompt, named[1])
        if not isinstance(value, str):
            raise DataError(
                f"prompt {prompt.index} has no {named[1]} for the teacher's hint",
                why=f"`hint` in {KEY} names {named[0]}, and the prompt's row has no such text",
                fix="miles data check FILE   # shows what each row has",
            )
        return value

    hint = _FIELD.sub(value_of, hint)  # at once: a value may itself contain {label}
    messages = [dict(message) for message in prompt.messages]
    place = max((n for n, one in enumerate(messages) if one["role"] == "user"), default=-1)
    is_same = (
        tokenizer.encode_text(tokenizer.render(messages, tools=prompt.tools)) == prompt.token_ids
    )
    if place < 0 or not isinstance(messages[place]["content"], str) or not is_same:
        raise DataError(
            f"prompt {prompt.index} cannot be shown to the teacher with its hint",
            why="a hint follows the text of the user's last message, and this prompt has images or "
            "no such message",
            fix=f"remove `hint` from {KEY}",
        )
    messages[place]["content"] += hint
    return tokenizer.encode_text(tokenizer.render(messages, tools=prompt.tools))


def _replace_prompt(words: TeacherTokens, told: int, known: int) -> TeacherTokens:
    """Return the predictions for a sequence whose first `told` tokens are replaced by `known`
    others."""

    def moved(data: bytes, each: int) -> bytes:
        return bytes(known * each) + data[told * each :]

    return replace(
        words,
        token_ids=moved(words.token_ids, 4 * words.topk),
        logprobs=moved(words.logprobs, 4 * max(words.topk, 1)),
    )
