"""Shows two rewards of the same samples: how far they agree, what the second one rewards, and the
samples that it judges differently."""

from __future__ import annotations

from dataclasses import asdict

from milescli.console.columns import percent
from milescli.console.output import Output
from milescli.runtime.evaluation.rescore import Comparison, Rescored

SHOWN_CHARACTERS = 400
"""Number of characters shown: the last ones of a response, where answers are, and the first ones of
a prompt."""


def show_comparison(compared: Comparison, *, num_flips: int, output: Output) -> None:
    """Show the whole comparison, with the texts of `num_flips` samples."""
    output.json("rewards", as_json(compared))
    a, b = compared.names
    output.table(
        ["", a, b],
        [
            ["mean reward", *(f"{mean:.3f}" for mean in compared.means)],
            ["right", *_right(compared)],
            ["groups without a difference", *compared.silent_groups],
        ],
        title=f"{compared.agreement.num_samples} samples of {compared.agreement.num_groups} groups",
    )
    output.table(["agreement", "", ""], _agreement(compared))
    for one in compared.suspicions:
        output.warn(
            f"`{b}` pays for {one.says}, more than `{a}`: correlation with the gain "
            f"{one.correlation:.2f} within prompts, p = {one.p_value:.1g}"
        )
    missing, labelled = compared.without_label
    if labelled and 2 * missing > labelled:
        output.warn(
            f"of {labelled} samples that only `{b}` calls right, {missing} do not contain the label"
        )
    if compared.no_advantages:
        output.note(f"no advantages: {compared.no_advantages}")
    flips = compared.flips
    for one in flips[:num_flips]:
        output.text(_shown(one, names=compared.names))
    if len(flips) > num_flips:
        output.note(f"{len(flips)} samples change; --show {len(flips)} shows all, --json too")


def as_json(compared: Comparison) -> dict[str, object]:
    """Return all figures, and each sample whose reward changes."""
    return {
        "names": list(compared.names),
        "means": list(compared.means),
        "silent_groups": list(compared.silent_groups),
        "agreement": {**asdict(compared.agreement), "share": compared.agreement.share},
        "suspicions": [asdict(one) for one in compared.suspicions],
        "without_label": list(compared.without_label),
        "no_advantages": compared.no_advantages,
        "flips": [
            {
                "step": one.step,
                "prompt_index": one.prompt.index,
                "sample_index": one.sample.sample_index,
                "prompt": one.prompt.text,
                "label": one.prompt.label,
                "response": one.sample.text,
                "rewards": [one.a, one.b],
                "advantages": [one.advantage_a, one.advantage_b],
            }
            for one in compared.flips
        ],
    }


def _right(compared: Comparison) -> tuple[str, str]:
    counted = compared.agreement
    return (
        percent((counted.both_right + counted.only_a) / counted.num_samples),
        percent((counted.both_right + counted.only_b) / counted.num_samples),
    )


def _agreement(compared: Comparison) -> list[list[str]]:
    counted, (a, b) = compared.agreement, compared.names
    kappa = "none" if counted.kappa is None else f"{counted.kappa:.2f}"
    rows = [
        ["same verdict", percent(counted.share), f"kappa {kappa}"],
        ["right by one alone", f"{a}: {counted.only_a}", f"{b}: {counted.only_b}"],
    ]
    if counted.pairs_agree is not None:
        of = f"of {counted.num_pairs} pairs of one prompt"
        rows.append(["same order", percent(counted.pairs_agree), of])
    signs = [
        (one.advantage_a > 0) != (one.advantage_b > 0)
        for one in compared.samples
        if one.advantage_a and one.advantage_b
    ]
    if signs:
        of = f"of {len(signs)} that are not 0 in either"
        rows.append(["advantage of another sign", str(sum(signs)), of])
    return rows


def _shown(one: Rescored, *, names: tuple[str, str]) -> str:
    a, b = names
    advantages = (
        ""
        if one.advantage_a is None or one.advantage_b is None
        else f"   advantage {one.advantage_a:+.2f} -> {one.advantage_b:+.2f}"
    )
    return "\n".join(
        [
            "",
            f"step {one.step}, prompt {one.prompt.index}, sample {one.sample.sample_index}: "
            f"{a} {one.a:g} -> {b} {one.b:g}{advantages}",
            f"  prompt    {_line(one.prompt.text[:SHOWN_CHARACTERS])}",
            f"  label     {_line((one.prompt.label or '-')[:SHOWN_CHARACTERS])}",
            f"  response  {_line(one.sample.text[-SHOWN_CHARACTERS:])}",
        ]
    )


def _line(text: str) -> str:
    return text.strip().replace("\n", "\n            ")
