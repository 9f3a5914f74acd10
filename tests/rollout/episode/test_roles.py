"""Worked episodes of several roles, as the conversations that each role had."""

from __future__ import annotations

from typing import Any

import pytest

from milescli.core.errors import DataError
from milescli.core.types import Prompt
from milescli.data.tokenizer import ChatTokenizer
from milescli.recipe.agents import Role, SpeakerSettings
from milescli.recipe.schema import Rollout
from milescli.rollout.episode.roles import role_demonstrations, roles_of
from tests.data.chat_templates import QWEN_3_5, tokenizer_of

ROLES = {"teller": Role(prompt="Tell.", sees="prompt"), "solver": Role(sees="others")}


def turn(name: str, text: str) -> dict[str, Any]:
    """Of a demonstration."""
    return {"role": "assistant", "name": name, "content": text}


def worked(*turns: dict[str, Any]) -> Prompt:
    """A row."""
    return Prompt(index=4, token_ids=[1], text="3 + 4?", label="7", demonstration=turns)


def test_each_role_imitates_its_own_turns_in_what_it_sees(tokenizer: ChatTokenizer) -> None:
    said = [turn("teller", "3 4"), turn("solver", "?"), turn("teller", "3 4!"), turn("solver", "7")]
    made = role_demonstrations(worked(*said), tokenizer, roles=ROLES)
    texts = ["".join(tokenizer.pieces(line.token_ids.tolist())) for line in made.values()]
    assert texts[0].startswith("<|im_start|>system\nTell.<|im_end|>\n<|im_start|>user\n3 + 4?")
    assert texts[1].startswith("<|im_start|>user\nteller: 3 4<|im_end|>")
    learned = {
        name: tokenizer.decode(
            token for token, on in zip(line.token_ids, line.loss_mask, strict=True) if on
        )
        for name, line in made.items()
    }
    assert learned == {"teller": "3 43 4!", "solver": "?7"}


def test_a_template_that_drops_reasoning_blocks_takes_several_sequences() -> None:
    tokenizer = tokenizer_of(QWEN_3_5.template, special=QWEN_3_5.special, eos=QWEN_3_5.eos)
    said = [turn("teller", "3 4"), turn("solver", "?"), turn("teller", "3 4!"), turn("solver", "7")]
    made = role_demonstrations(worked(*said), tokenizer, roles=ROLES)
    assert list(made) == ["teller", "solver", "solver (2)"]


def test_a_role_that_an_endpoint_plays_is_not_imitated(tokenizer: ChatTokenizer) -> None:
    played = {**ROLES, "teller": Role(endpoint=SpeakerSettings(url="http://h/v1", model="m"))}
    prompt = worked(turn("teller", "3 4"), turn("solver", "7"))
    assert list(role_demonstrations(prompt, tokenizer, roles=played)) == ["solver"]


@pytest.mark.parametrize(
    ("demonstration", "why"),
    [
        ("#### 7", "it is a single text"),
        ([{"role": "assistant", "content": "7"}], "it has a turn of None"),
        ([turn("teller", "3 4"), turn("sovler", "7")], "it has a turn of sovler"),
    ],
)
def test_a_demonstration_that_does_not_say_who_speaks_is_refused(
    tokenizer: ChatTokenizer, demonstration: Any, why: str
) -> None:
    prompt = Prompt(index=4, token_ids=[1], text="3 + 4?", demonstration=demonstration)
    with pytest.raises(DataError, match="demonstration of row 5 does not name") as caught:
        role_demonstrations(prompt, tokenizer, roles=ROLES)
    assert why in caught.value.why and "'name': 'teller'" in caught.value.fixes[0]


def test_roles_speak_where_the_agent_has_them() -> None:
    assert roles_of(Rollout(agent="multi_agent", roles=ROLES)) == ROLES
    assert not roles_of(Rollout(agent="tools", roles=ROLES))
