"""Small rows in the shape of each layout that is recognised, with what is read of them."""

from __future__ import annotations

import json
from typing import Any


def said(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


ASK, TELL, WRONG = said("user", "2+2?"), said("assistant", "4"), said("assistant", "5")
HUMAN, GPT = {"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}
PLAIN = "user: 2+2?"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
HH = "\n\nHuman: 2+2?\n\nAssistant:"
CALLED = "user: 2+2? | assistant: weather(city=Rome)"
CALL = {"name": "weather", "arguments": {"city": "Rome"}}

PROMPTS: list[tuple[str, dict[str, Any], str, str | None]] = [
    (
        "verl",
        {
            "data_source": "gsm8k",
            "prompt": [ASK],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "4"},
            "extra_info": {"index": 0, "answer": "#### 4"},
        },
        PLAIN,
        "4",
    ),
    (
        "verl",
        {"prompt": [said("system", "Brief."), ASK], "reward_model": {"ground_truth": 4}},
        f"system: Brief. | {PLAIN}",
        "4",
    ),
    (
        "DAPO-Math-17k, processed",
        {
            "prompt": "2+2?",
            "solution": "4",
            "source_prompt": [said("user", "Solve: 2+2? Think.")],
            "reward_model": {"ground_truth": "4", "style": "rule"},
        },
        PLAIN,
        "4",
    ),
    *(
        (name, {"question": "2+2?", **row}, f"{PLAIN}¶A. 3\nB. 4\nC. 5", "B")
        for name, row in (
            ("MMLU", {"subject": "sums", "choices": ["3", "4", "5"], "answer": 1}),
            ("MMLU", {"choices": ["3", "4", "5"], "answer": "b"}),
            ("MMLU-Pro", {"options": ["3", "4", "5"], "answer": "B", "answer_index": 1}),
            ("RACE", {"article": "", "options": ["3", "4", "5"], "answer": "B"}),
            (
                "ARC, CommonsenseQA",
                {"choices": {"text": ["3", "4", "5"], "label": ["1", "2", "3"]}, "answerKey": "2"},
            ),
            (
                "ARC, CommonsenseQA",
                {
                    "choices": [
                        {"label": letter, "text": text}
                        for letter, text in (("A", "3"), ("B", "4"), ("C", "5"))
                    ],
                    "answerKey": "B",
                },
            ),
            ("MedQA", {"options": {"A": "3", "B": "4", "C": "5", "D": None}, "answer_idx": "B"}),
            ("AQuA-RAT", {"options": ["A)3", "B)4", "C)5"], "correct": "B"}),
            (
                "Social IQa",
                {"context": "", "answerA": "3", "answerB": "4", "answerC": "5", "label": "2"},
            ),
        )
    ),
    *(
        (name, {key: "2+2?", **row}, f"{PLAIN}¶A. 3\nB. 4{rest}", "B")
        for name, key, row, rest in (
            ("question and options", "question", {"options": ["3", "4"], "answer": "B"}, ""),
            (
                "LogiQA",
                "query",
                {"context": "", "options": ["3", "4"], "correct_option": 1},
                "",
            ),
            ("PIQA", "goal", {"sol1": "3", "sol2": "4", "label": 1}, ""),
            ("WinoGrande", "sentence", {"option1": "3", "option2": "4", "answer": "2"}, ""),
            (
                "CosmosQA",
                "question",
                {"context": "", **{f"answer{n}": str(n + 3) for n in range(4)}, "label": 1},
                "\nC. 5\nD. 6",
            ),
            (
                "MedMCQA",
                "question",
                {"opa": "3", "opb": "4", "opc": "5", "opd": "6", "cop": 1},
                "\nC. 5\nD. 6",
            ),
        )
    ),
    (
        "OpenBookQA",
        {
            "question_stem": "2+2?",
            "choices": {"text": ["3", "4"], "label": ["A", "B"]},
            "answerKey": "B",
        },
        f"{PLAIN}¶A. 3\nB. 4",
        "B",
    ),
    (
        "HellaSwag",
        {"ctx_a": "2", "ctx_b": "+2?", "ctx": "2+2?", "endings": ["3", "4"], "label": "1"},
        f"{PLAIN}¶A. 3\nB. 4",
        "B",
    ),
    (
        "SciQ",
        {
            "question": "2+2?",
            "distractor3": "6",
            "distractor1": "3",
            "distractor2": "5",
            "correct_answer": "4",
            "support": "2+2=4",
        },
        f"{PLAIN}¶A. 3\nB. 4\nC. 5\nD. 6",
        "B",
    ),
    ("slime, Miles", {"prompt": "2+2?", "label": "4", "metadata": {"a": 1}}, PLAIN, "4"),
    ("slime, Miles", {"prompt": [ASK], "label": "4", "tools": [TOOL]}, f"{PLAIN} +weather", "4"),
    ("TRL prompt-only", {"prompt": [ASK]}, PLAIN, None),
    ("TRL prompt-only", {"prompt": "2+2?", "solution": "4"}, PLAIN, "4"),
    ("ms-swift GRPO", {"messages": [ASK], "solution": "4"}, PLAIN, "4"),
    ("OpenAI, answered", {"messages": [ASK], "answer": "4"}, PLAIN, "4"),
    (
        "verifiers",
        {"prompt": [ASK], "question": "2+2?", "answer": "4", "info": {}, "task": "sums"},
        PLAIN,
        "4",
    ),
    ("verifiers", {"question": "2+2?", "answer": "4", "info": "{}"}, PLAIN, "4"),
    ("verifiers", {"question": "2+2?", "answer": "4", "task": "sums"}, PLAIN, "4"),
    (
        "PrimeIntellect",
        {"problem_id": "a", "prompt": "2+2?", "verification_info": '{"ground_truth": "4"}'},
        PLAIN,
        "4",
    ),
    ("AReaL", {"prompt": "2+2?", "query_id": "a", "solutions": ["4"], "task": "m"}, PLAIN, "4"),
    (
        "AReaL, code",
        {"prompt": "2+2?", "query_id": "a", "input_output": '{"inputs": []}'},
        PLAIN,
        '{"inputs": []}',
    ),
    (
        "ROLL",
        {
            "id": "1",
            "prompt": "2+2?",
            "messages": json.dumps([ASK]),
            "ground_truth": "4",
            "tag": "math",
        },
        PLAIN,
        "4",
    ),
    (
        "OpenRLHF",
        {"context_messages": [ASK], "context": "2+2?", "label": "4"},
        PLAIN,
        "4",
    ),
    ("GSM8K", {"question": "2+2?", "answer": "4"}, PLAIN, "4"),
    ("MATH", {"problem": "2+2?", "level": "1", "type": "a", "solution": "4"}, PLAIN, "4"),
    (
        "OpenR1-Math",
        {"problem": "2+2?", "solution": "so 4", "answer": "4", "messages": [ASK, TELL]},
        PLAIN,
        "4",
    ),
    (
        "NuminaMath",
        {"source": "a", "problem": "2+2?", "solution": "so 4", "messages": [ASK, TELL]},
        PLAIN,
        "so 4",
    ),
    ("MATH with answers", {"problem": "2+2?", "solution": "so 4", "answer": "4"}, PLAIN, "4"),
    ("Big-Math", {"prompt": "2+2?", "solution": "so 4", "answer": "4"}, PLAIN, "4"),
    ("DeepMath", {"question": "2+2?", "final_answer": "4", "r1_solution_1": "so"}, PLAIN, "4"),
    ("APPS", {"question": "2+2?", "input_output": "{}", "starter_code": ""}, PLAIN, "{}"),
    (
        "SQuAD",
        {"question": "2+2?", "context": "A book.", "answers": {"text": ["4"], "start": [1]}},
        f"{PLAIN}¶A book.",
        "4",
    ),
    (
        "HumanEval",
        {"task_id": "a", "prompt": "2+2?", "test": "assert", "entry_point": "f"},
        PLAIN,
        None,
    ),
]
"""Layout, a row of it, and the prompt and the label that are read."""

CHATS: list[tuple[str, dict[str, Any], str]] = [
    ("Alpaca", {"instruction": "2+2?", "input": "", "output": "4"}, f"{PLAIN} | assistant: 4"),
    (
        "Alpaca",
        {
            "instruction": "Add",
            "input": "2+2",
            "output": "4",
            "system": "Brief.",
            "history": [["1+1?", "2"]],
        },
        "system: Brief. | user: 1+1? | assistant: 2 | user: Add¶2+2 | assistant: 4",
    ),
    (
        "Dolly",
        {"instruction": "2+2?", "context": "A book.", "response": "4", "category": "qa"},
        f"{PLAIN}¶A book. | assistant: 4",
    ),
    (
        "OpenOrca",
        {"system_prompt": "Brief.", "question": "2+2?", "response": "4"},
        f"system: Brief. | {PLAIN} | assistant: 4",
    ),
    (
        "ms-swift",
        {"system": "Brief.", "query": "2+2?", "response": "4", "history": [["a", "b"]]},
        f"system: Brief. | user: a | assistant: b | {PLAIN} | assistant: 4",
    ),
    (
        "ShareGPT",
        {"system": "Brief.", "conversations": [HUMAN, GPT]},
        f"system: Brief. | {PLAIN} | assistant: 4",
    ),
    (
        "ShareGPT",
        {
            "conversations": [
                HUMAN,
                {"from": "function_call", "value": json.dumps(CALL)},
                {"from": "observation", "value": "sunny"},
                GPT,
            ],
            "tools": json.dumps([TOOL["function"]]),
        },
        f"{CALLED} | tool: sunny | assistant: 4 +weather",
    ),
    (
        "ShareGPT of ms-swift",
        {"conversation": [{"human": "2+2?", "assistant": "4"}]},
        f"{PLAIN} | assistant: 4",
    ),
    (
        "OpenAI messages",
        {"messages": [ASK, said("assistant", [{"type": "text", "text": "4"}])]},
        f"{PLAIN} | assistant: 4",
    ),
    (
        "OpenAI messages",
        {
            "messages": [
                ASK,
                said("assistant", "", tool_calls=[{"type": "function", "function": CALL}]),
                said("tool", "sunny"),
                TELL,
            ],
            "tools": [TOOL],
        },
        f"{CALLED} | tool: sunny | assistant: 4 +weather",
    ),
    (
        "OpenAI messages",
        {
            "messages": [
                ASK,
                said("tool_call", json.dumps(CALL)),
                said("tool_call", json.dumps(CALL)),
                said("tool_response", "sunny"),
                TELL,
            ],
            "tools": json.dumps([TOOL]),
        },
        f"{CALLED},weather(city=Rome) | tool: sunny | assistant: 4 +weather",
    ),
    (
        "Anthropic messages",
        {
            "system": "Brief.",
            "messages": [
                ASK,
                said(
                    "assistant",
                    [{"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Rome"}}],
                ),
                said(
                    "user",
                    [{"type": "tool_result", "tool_use_id": "1", "content": "sunny"}],
                ),
                TELL,
            ],
            "tools": [{"name": "weather", "input_schema": CITY}],
        },
        f"system: Brief. | {CALLED} | tool: sunny | assistant: 4 +weather",
    ),
    (
        "Gemini",
        {
            "systemInstruction": {"parts": [{"text": "Brief."}]},
            "contents": [
                {"role": "user", "parts": [{"text": "2+2?"}]},
                {"role": "model", "parts": [{"text": "4"}]},
            ],
        },
        f"system: Brief. | {PLAIN} | assistant: 4",
    ),
    (
        "xlam function calling",
        {
            "id": 1,
            "query": "2+2?",
            "answers": json.dumps([CALL]),
            "tools": json.dumps([{"name": "weather", "parameters": {"city": {"type": "str"}}}]),
        },
        f"{CALLED} +weather",
    ),
    (
        "UltraChat",
        {"prompt": "2+2?", "prompt_id": "a", "messages": [ASK, TELL]},
        f"{PLAIN} | assistant: 4",
    ),
    ("chat", {"conversation": [ASK, TELL], "model": "a"}, f"{PLAIN} | assistant: 4"),
    ("chat", {"conversations": [ASK, TELL]}, f"{PLAIN} | assistant: 4"),
    (
        "TRL prompt and completion",
        {"prompt": [ASK], "completion": [TELL]},
        f"{PLAIN} | assistant: 4",
    ),
    ("TRL prompt and completion", {"prompt": "2+2?", "completion": "4"}, f"{PLAIN} | assistant: 4"),
    ("verl SFT", {"prompt": "2+2?", "response": "4"}, f"{PLAIN} | assistant: 4"),
    ("NeMo SFT", {"input": "2+2?", "output": "4"}, f"{PLAIN} | assistant: 4"),
    ("TRL language modeling", {"text": "2+2 is 4"}, "2+2 is 4"),
    (
        "OpenMathInstruct",
        {"problem": "2+2?", "generated_solution": "4", "expected_answer": "4"},
        f"{PLAIN} | assistant: 4",
    ),
]
"""Layout, a row of it, and what is learned from, tools behind it."""

PAIRS: list[tuple[str, dict[str, Any]]] = [
    ("TRL preference", {"prompt": "2+2?", "chosen": "4", "rejected": "5"}),
    ("TRL preference", {"prompt": [ASK], "chosen": [TELL], "rejected": [WRONG]}),
    ("TRL preference, implicit prompt", {"chosen": [ASK, TELL], "rejected": [ASK, WRONG]}),
    (
        "UltraFeedback",
        {
            "prompt": "2+2?",
            "chosen": [ASK, TELL],
            "rejected": [ASK, WRONG],
            "messages": [ASK, TELL],
            "score_chosen": 9.0,
        },
    ),
    ("HH", {"chosen": f"{HH} 4", "rejected": f"{HH} 5"}),
    ("HH", {"chosen": f"{HH} 4".strip(), "rejected": f"{HH} 5".strip()}),
    ("HH with a prompt", {"prompt": HH, "chosen": " 4", "rejected": " 5"}),
    ("Orca DPO pairs", {"system": "", "question": "2+2?", "chosen": "4", "rejected": "5"}),
    (
        "LLaMA-Factory preference",
        {"conversations": [HUMAN], "chosen": GPT, "rejected": {"from": "gpt", "value": "5"}},
    ),
    ("XTuner preference", {"chosen_messages": [ASK, TELL], "rejected_messages": [ASK, WRONG]}),
    (
        "Argilla preference",
        {"instruction": "2+2?", "chosen_response": "4", "rejected_response": "5"},
    ),
    ("preference by name", {"question": "2+2?", "chosen": "4", "rejected": "5"}),
    ("ms-swift preference", {"messages": [ASK, TELL], "rejected_response": "5"}),
    ("ms-swift preference", {"messages": [ASK, TELL], "rejected_messages": [ASK, WRONG]}),
    (
        "OpenAI preference",
        {
            "input": {"messages": [ASK], "tools": [], "parallel_tool_calls": True},
            "preferred_output": [TELL],
            "non_preferred_output": [WRONG],
        },
    ),
]
"""Layout, and a row of it; 4 is chosen and 5 rejected."""

JUDGED = [
    ("TRL unpaired preference", {"prompt": "2+2?", "completion": "4", "label": True}),
    ("ms-swift KTO", {"messages": [ASK, TELL], "label": True}),
]

REFUSED = [
    ("TRL stepwise supervision", {"prompt": "a", "completions": ["b"], "labels": [True]}),
    ("SHP", {"history": "a", "human_ref_A": "b", "human_ref_B": "c", "labels": 1}),
    ("PKU-SafeRLHF", {"prompt": "a", "response_0": "b", "response_1": "c"}),
    ("OpenAssistant tree", {"message_id": "1", "parent_id": "0", "text": "a", "role": "user"}),
    ("Glaive function calling", {"system": "a", "chat": "USER: b"}),
]
