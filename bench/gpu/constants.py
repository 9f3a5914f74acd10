"""The planner's constants of a device, from the figures of a visit to it. A constant that was not
measured, or whose figures contradict each other, is left out: the planner keeps its estimate. Pure;
called by `report.py`."""

from __future__ import annotations

from collections.abc import Mapping

from lines import Record

TRAINED = ("train.qwen3-1.7b", "miles", "train_share")
EXPERTS = ("train.small-moe", "miles", "expert_share")
PREFILL = ("engine", "prefill", "prefill_share")
MOST = 1.2
"""A share above this is no share: the data sheet is another device's."""

Figures = Mapping[tuple[str, str], Record]


def constants_of(records: Figures) -> dict[str, float]:
    """Names of `milescli.plan.devices.Efficiency` -> values."""
    found: dict[str, float | None] = {
        "train_share": _share(_figure(records, *TRAINED)),
        "expert_share": _share(_figure(records, *EXPERTS)),
        "prefill_share": _share(_figure(records, *PREFILL)),
        "host_bandwidth": _host_bandwidth(records),
        "trainer_context": _largest(records, "memory.", "context", "trainer_context_bytes"),
        **_decoding(records),
    }
    found["bucket_s"] = _bucket_s(records, found["decode_share"])
    return {name: value for name, value in found.items() if value is not None}


def _figure(records: Figures, check: str, line: str, figure: str) -> float | None:
    record = records.get((check, line))
    return record.figures.get(figure) if record and record.verdict.is_good else None


def _share(value: float | None) -> float | None:
    return round(value, 4) if value is not None and 0 < value <= MOST else None


def _largest(records: Figures, prefix: str, line: str, figure: str) -> float | None:
    values = [
        record.figures[figure]
        for (check, name), record in records.items()
        if check.startswith(prefix) and name == line and figure in record.figures
    ]
    return max(values, default=None)


def _host_bandwidth(records: Figures) -> float | None:
    """A way there and a way back take as long as two ways at this rate."""
    rates = [
        _figure(records, "sleep", line, "bytes_per_s") for line in ("trainer_sleep", "trainer_wake")
    ]
    there, back = rates
    if there is None or back is None or min(there, back) <= 0:
        return None
    return round(2 / (1 / there + 1 / back))


def _decoding(records: Figures) -> dict[str, float | None]:
    """`step_s = bytes / (bandwidth * share) + overhead`, from the fewest and the most requests at
    once (Williams et al., Roofline, CACM 2009)."""
    points = []
    for line in ("decode_1", "decode_512"):
        figures = [
            _figure(records, "engine", line, name)
            for name in ("bytes_per_step", "step_s", "sheet_bytes_per_s")
        ]
        if None in figures:
            return {"decode_share": None, "decode_step_s": None}
        points.append(figures)
    (few_bytes, few_s, rate), (many_bytes, many_s, _) = points
    if many_s <= few_s or many_bytes <= few_bytes:
        return {"decode_share": None, "decode_step_s": None}
    share = _share((many_bytes - few_bytes) / (rate * (many_s - few_s)))
    overhead = few_s - few_bytes / (rate * share) if share else -1.0
    if share is None or overhead < 0:
        return {"decode_share": None, "decode_step_s": None}
    return {"decode_share": share, "decode_step_s": round(overhead, 6)}


def _bucket_s(records: Figures, decode_share: float | None) -> float | None:
    """What a publish takes beside the transfer of its bytes, for each bucket."""
    taken, size, count = (
        _figure(records, "publish", "publish", name)
        for name in ("publish_s", "size_bytes", "num_buckets")
    )
    rate = _figure(records, "engine", "decode_1", "sheet_bytes_per_s")
    if taken is None or size is None or not count or rate is None or decode_share is None:
        return None
    return round(max(0.0, taken - size / (rate * decode_share)) / count, 5)
