"""Log-probs of tokens by transformers: `... -m tests.backends.megatron.plain_scores FOLDER ROWS`.
In a process of its own: the CPU shim changes torch, and transformers builds other models then."""

from __future__ import annotations

import json
import sys

import torch


def main() -> None:
    """Print [rows][tokens - 1], as JSON behind `ROWS`."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    rows = []
    for row in json.loads(sys.argv[2]):
        ids = torch.tensor([row])
        with torch.no_grad():
            logprobs = model(ids).logits[0, :-1].log_softmax(-1)
        rows.append(logprobs.gather(-1, ids[0, 1:, None])[:, 0].tolist())
    print("ROWS" + json.dumps(rows))


if __name__ == "__main__":
    main()
