"""Defines published benchmarks by name: where their rows are, and how a row becomes a prompt, a
label and a domain. Pure; the runtime downloads and writes them. Rewards score them like any other
prompts."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

Row = Mapping[str, object]
BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
"""The directive of Qwen2.5-Math and DeepSeek-R1 (their model cards)."""
LETTERS = "ABCDEFGHIJ"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Holds one row of a benchmark as prompt, label and domain."""

    prompt: str
    label: str
    domain: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """Describes where a benchmark's questions are, and how they are asked and scored."""

    hub: str
    """Its name in `data.eval`."""
    columns: Sequence[str]
    """Columns that a row must have."""
    question: Callable[[Row, int, Sequence[Row]], Question]
    """Makes the question from a row, its place, and the worked examples."""
    source: str
    """Publication of this form of the benchmark."""
    num_prompts: int
    """Number of prompts, as published."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Settings by recipe key; the user's own settings win."""
    examples_hub: str | None = None
    """Worked examples to put before each question; None: there are none."""


def _gsm8k(row: Row, place: int, examples: Sequence[Row]) -> Question:
    answer = str(row["answer"]).rpartition("####")[2].strip()
    return Question(prompt=f"{row['question']}\n{BOXED}", label=answer)


def _math(row: Row, place: int, examples: Sequence[Row]) -> Question:
    return Question(
        prompt=f"{row['problem']}\n{BOXED}",
        label=str(row["answer"]),
        domain=_text_of(row, "subject"),
    )


def _gpqa(row: Row, place: int, examples: Sequence[Row]) -> Question:
    """Make a question whose four answers are in an order that depends only on the row's place."""
    right = str(row["Correct Answer"]).strip()
    options = [right, *(str(row[f"Incorrect Answer {number}"]).strip() for number in (1, 2, 3))]
    order = random.Random(place).sample(range(4), 4)
    prompt = (
        "Choose the right one of four answers. Reason step by step, and end with a line "
        f"`Answer: X`, X being its letter.\n\n{str(row['Question']).strip()}\n\n"
        + _listed([options[at] for at in order], sign=")")
    )
    return Question(
        prompt=prompt, label=LETTERS[order.index(0)], domain=_text_of(row, "High-level domain")
    )


def _text_of(row: Row, key: str) -> str | None:
    return None if row.get(key) is None else str(row[key])


def _mmlu_pro(row: Row, place: int, examples: Sequence[Row]) -> Question:
    """Put five worked examples of the category before the question (Wang et al. 2024, section
    5.1)."""
    shots = [other for other in examples if other["category"] == row["category"]][:5]
    parts = [
        f"Here are questions on {row['category']} with several options each. Reason step by step, "
        'then finish with "the answer is (X)", X being the letter of the right option.'
    ]
    for shot in shots:
        worked = str(shot["cot_content"]).removeprefix("A: ").strip()
        parts.append(f"{_optioned(shot)}\nAnswer: {worked}")
    parts.append(f"{_optioned(row)}\nAnswer: Let's think step by step.")
    return Question(
        prompt="\n\n".join(parts), label=str(row["answer"]), domain=str(row["category"])
    )


def _optioned(row: Row) -> str:
    options = [str(one) for one in _items(row["options"]) if one != "N/A"]
    return f"Question: {row['question']}\nOptions:\n{_listed(options, sign='.')}"


def _listed(options: Sequence[str], *, sign: str) -> str:
    return "\n".join(f"{LETTERS[at]}{sign} {text}" for at, text in enumerate(options))


def _items(value: object) -> list[object]:
    return list(value) if isinstance(value, Iterable) else []


def _ifeval(row: Row, place: int, examples: Sequence[Row]) -> Question:
    label = {key: _items(row[key]) for key in ("instruction_id_list", "kwargs")}
    first = str(label["instruction_id_list"][0]) if label["instruction_id_list"] else ""
    return Question(
        prompt=str(row["prompt"]),
        label=json.dumps(label),
        domain=first.partition(":")[0] if len(label["instruction_id_list"]) == 1 else "several",
    )


_AIME = {
    "rollout.reward": "math",
    "data.max_prompt_tokens": 1024,
    "eval.max_response_tokens": 32768,
    "eval.temperature": 0.6,
    "eval.top_p": 0.95,
    "eval.samples_per_prompt": 64,
}
"""DeepSeek-R1 (arXiv 2501.12948, section 3): 64 samples at temperature 0.6 and top-p 0.95."""

BENCHMARKS: Mapping[str, Benchmark] = {
    "gsm8k": Benchmark(
        hub="hf:openai/gsm8k:main:test",
        columns=("question", "answer"),
        question=_gsm8k,
        source="Cobbe et al. 2021, arXiv 2110.14168; asked without examples, as by Qwen2.5-Math",
        num_prompts=1319,
        settings={
            "rollout.reward": "math",
            "data.max_prompt_tokens": 1024,
            "eval.max_response_tokens": 2048,
        },
    ),
    "math-500": Benchmark(
        hub="hf:HuggingFaceH4/MATH-500:test",
        columns=("problem", "answer"),
        question=_math,
        source="Hendrycks et al. 2021, arXiv 2103.03874; the 500 of Lightman et al. 2023, arXiv "
        "2305.20050",
        num_prompts=500,
        settings={
            "rollout.reward": "math",
            "data.max_prompt_tokens": 2048,
            "eval.max_response_tokens": 4096,
        },
    ),
    "aime-2024": Benchmark(
        hub="hf:HuggingFaceH4/aime_2024:train",
        columns=("problem", "answer"),
        question=_math,
        source="AIME I and II of 2024; sampled as by DeepSeek-R1, arXiv 2501.12948",
        num_prompts=30,
        settings=_AIME,
    ),
    "gpqa-diamond": Benchmark(
        hub="hf:Idavidrein/gpqa:gpqa_diamond:train",
        columns=("Question", "Correct Answer", *(f"Incorrect Answer {n}" for n in (1, 2, 3))),
        question=_gpqa,
        source="Rein et al. 2023, arXiv 2311.12022; without examples, with reasoning first",
        num_prompts=198,
        settings={
            "rollout.reward": "multiple_choice",
            "data.max_prompt_tokens": 4096,
            "eval.max_response_tokens": 4096,
        },
    ),
    "mmlu-pro": Benchmark(
        hub="hf:TIGER-Lab/MMLU-Pro:test",
        columns=("question", "options", "answer", "category"),
        question=_mmlu_pro,
        source="Wang et al. 2024, arXiv 2406.01574; five worked examples of the category",
        num_prompts=12032,
        settings={
            "rollout.reward": "multiple_choice",
            "data.max_prompt_tokens": 8192,
            "eval.max_response_tokens": 2048,
        },
        examples_hub="hf:TIGER-Lab/MMLU-Pro:validation",
    ),
    "ifeval": Benchmark(
        hub="hf:google/IFEval",
        columns=("prompt", "instruction_id_list", "kwargs"),
        question=_ifeval,
        source="Zhou et al. 2023, arXiv 2311.07911; prompt-level strict accuracy",
        num_prompts=541,
        settings={
            "rollout.reward": "instructions",
            "rollout.instructions.score": "all",
            "rollout.instructions.mode": "strict",
            "data.max_prompt_tokens": 2048,
            "eval.max_response_tokens": 1280,
        },
    ),
}
"""Benchmarks by the name that `--data` accepts."""

COMMON_SETTINGS: Mapping[str, object] = {
    "rollout.agent": "single_turn",
    "rollout.stop": [],
    "data.prompt_key": "prompt",
    "data.label_key": "label",
    "data.system_prompt": None,
    "data.long_prompts": "error",
    "eval.temperature": 0.0,
    "eval.top_p": 1.0,
    "eval.samples_per_prompt": 1,
    "eval.function": "all",
    "eval.num_prompts": None,
}
"""Settings of every benchmark, unless the benchmark or the user overrides them; no question is left
out."""
