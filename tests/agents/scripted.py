"""Sessions of a policy that says what a test tells it to, token by token as a real one."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

from milescli.core.types import Prompt, StopReason, VersionSpan, WeightVersion
from milescli.rollout.base import Completion, GenerateRequest
from milescli.rollout.episode.session import ChatForm, RecordingSession
from tests.data.chat_templates import FAMILIES, tokenizer_of


class Engine:
    """Says the next text each time; one that ends in `...` is cut off."""

    def __init__(self, texts: Sequence[str], *, family: str = "chatml") -> None:
        shape = FAMILIES[family]
        self.tokenizer = tokenizer_of(shape.template, special=shape.special, eos=shape.eos)
        self.texts = list(texts)
        self.given: list[str] = []
        """What it was asked, as text."""
        self.seeds: list[int | None] = []

    async def generate(self, request: GenerateRequest) -> Completion:
        """See RolloutEngine."""
        text = self.texts[len(self.given)]
        self.seeds.append(request.seed)
        self.given.append(self.text_of(request.prompt_ids))
        ids = self.tokenizer.inner(text, add_special_tokens=False)["input_ids"]
        is_cut = text.endswith("...")
        tokens = ids if is_cut else [*ids, self.tokenizer.eos_id]
        return Completion(
            response_ids=tokens,
            logprobs=array("f", [-1.0] * len(tokens)),
            stop_reason=StopReason.LENGTH if is_cut else StopReason.STOP,
            version_spans=[VersionSpan(start=0, end=len(tokens), version=WeightVersion(0))],
        )

    def text_of(self, token_ids: Sequence[int]) -> str:
        """With special tokens."""
        return self.tokenizer.inner.decode(list(token_ids), skip_special_tokens=False)


def session_of(
    engine: Engine, *, max_tokens: int = 100_000, others: Mapping[str, Engine] | None = None
) -> RecordingSession:
    """One sample's. `others`: who plays roles beside the policy."""
    return RecordingSession(
        engine,  # type: ignore[arg-type]
        prompt=Prompt(index=0, token_ids=[], text=""),
        seed=1,
        settings=GenerateRequest(prompt_ids=(), max_new_tokens=1000),
        max_tokens=max_tokens,
        decode=engine.tokenizer.decode,
        chat_form=ChatForm(tokenizer=engine.tokenizer),
        others=others,  # type: ignore[arg-type]
    )


def sampled(engine: Engine, token_ids: Sequence[int], mask: bytes) -> list[str]:
    """Runs of tokens on a loss mask, as text."""
    runs, last = list[list[int]](), False
    for token, learned in zip(token_ids, mask, strict=True):
        if learned and not last:
            runs.append([])
        if learned:
            runs[-1].append(token)
        last = bool(learned)
    return [engine.text_of(run) for run in runs]
