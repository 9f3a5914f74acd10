"""Requests that a small pretrained model can learn to follow: a short sentence about something, in
a form that can be checked. The label has the form of the reward `instructions` (IFEval). Read as
`task:instructions`; nothing is downloaded."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence

REQUESTS = (
    "Write a short sentence about {topic}.",
    "Tell me something about {topic} in one sentence.",
    "Describe {topic} in one sentence.",
)
INSTRUCTIONS: Sequence[tuple[str, str, Mapping[str, object]]] = (
    (
        "Use the words old and green, like this: the sea is old and green.",
        "keywords:existence",
        {"keywords": ["old", "green"]},
    ),
    (
        'Put the sentence in double quotation marks, like this: "The sea is blue."',
        "startend:quotation",
        {},
    ),
    (
        "Use fewer than nine words.",
        "length_constraints:number_words",
        {"num_words": 9, "relation": "less than"},
    ),
    (
        "Begin with a title in double angular brackets, like this: <<The sea>> It is blue.",
        "detectable_format:title",
        {},
    ),
    (
        "Put one word between stars, like this: the *sea* is blue.",
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 1},
    ),
    (
        "End with the words: and that is all.",
        "startend:end_checker",
        {"end_phrase": "and that is all."},
    ),
)
"""(the request in words, IFEval's id, its parameters)"""
_WORDS = (
    "rivers bread bicycles winter coffee libraries trains bees music clouds mountains apples "
    "gardens horses bridges rain cheese lamps ships wolves stars tea windows markets castles "
    "spiders forests clocks soup islands paintings cats storms boots candles farms honey owls "
    "roads letters dragons snow kites pianos onions lakes towers chess foxes umbrellas deserts "
    "pencils whales sand carpets mirrors salt kings robots eggs violins caves doors summer "
    "planets dogs glass tigers shoes rice maps bells sheep wells feathers ladders butter "
    "volcanoes coins drums parrots fog boats roses turtles hammers milk circuses planes cabbages "
    "schools frogs keys sugar hats"
)
TOPICS = tuple(_WORDS.split())
HELDOUT_EVERY = 8
"""One topic in eight is held out, whatever the seed."""


def rows(*, seed: int) -> Iterator[Mapping[str, str]]:
    """Yield each training topic with each request and instruction, in an order that `seed`
    determines."""
    topics = [topic for number, topic in enumerate(TOPICS) if number % HELDOUT_EVERY]
    return iter(_shuffled(_rows(topics, REQUESTS), seed))


def heldout_rows(*, seed: int) -> Iterator[Mapping[str, str]]:
    """Yield topics that no run trains on, each with each instruction; the same rows for every
    seed."""
    return iter(_shuffled(_rows(TOPICS[::HELDOUT_EVERY], REQUESTS[:2]), 0))


def _rows(topics: Sequence[str], requests: Sequence[str]) -> list[Mapping[str, str]]:
    return [
        {
            "prompt": f"{request.format(topic=topic)} {wording}",
            "label": json.dumps({"instruction_id_list": [name], "kwargs": [parameters]}),
        }
        for topic in topics
        for request in requests
        for wording, name, parameters in INSTRUCTIONS
    ]


def _shuffled(rows: list[Mapping[str, str]], seed: int) -> list[Mapping[str, str]]:
    chance = random.Random(seed)
    # only random() is the same in every Python version
    return sorted(rows, key=lambda _: chance.random())
