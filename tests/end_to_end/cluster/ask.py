"""A driver that asks every node of a cluster several questions, each by itself: run on a node by
test_everywhere. `ADDRESS QUESTIONS`, the latter as JSON: [[target, kwargs, timeout_s], ...]."""

from __future__ import annotations

import json
import sys

from milescli.backends.ray.each_node import joined, run_on_each_node


def main(address: str, questions: str) -> None:
    """Print the answers to each question, or what it raised, on a line of its own."""
    with joined(address):
        for target, kwargs, timeout_s in json.loads(questions):
            try:
                answers = run_on_each_node(address, target, kwargs, timeout_s=timeout_s)
            except Exception as error:
                print(json.dumps(f"{type(error).__name__}: {error}"))
                continue
            rows = [
                {
                    "address": answer.node.address,
                    "is_driver": answer.node.is_driver,
                    "result": answer.result,
                    "error": answer.error and type(answer.error).__name__,
                    "text": str(answer.error),
                }
                for answer in answers
            ]
            print(json.dumps(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
