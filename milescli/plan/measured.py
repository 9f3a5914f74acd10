"""How much of a device's data sheet runs reach, and what their processes take beside what is
counted: estimates, until a visit to that device has measured them (`bench/gpu/report.py` writes
measured.json). Pure but for that one file of the package."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

from milescli.core.units import GIB

FILE = Path(__file__).with_name("measured.json")
"""{device as `8xNAME` says: {"source": ..., constant of Reached: value, ...}}"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """Of one kind of device. The defaults are estimates."""

    train_share: float = 0.45
    """Of peak FLOP/s that a dense layer's products reach in training, without communication."""
    expert_share: float = 0.30
    """The same of experts' products, which are small and many."""
    prefill_share: float = 0.45
    """Of peak FLOP/s in prefill."""
    decode_share: float = 0.70
    """Of memory bandwidth that decoding reaches. The one figure that the field has published would
    be 0.65 to 0.9 (`tests/plan/reported_times.py`)."""
    layer_s: float = 0.4e-3
    """Launching the kernels of one layer forward and backward, per microbatch: what small
    microbatches cost."""
    decode_step_s: float = 2e-3
    """Scheduling and sampling of one decode step, whatever its size."""
    host_bandwidth: float = 25e9
    """Bytes a second between a device and its host's memory (PCIe 5.0 x16 has 64e9)."""
    host_adam: float = 0.5e9
    """Numbers a second that a rank's share of the host's cores updates by Adam."""
    bucket_s: float = 0.01
    """Handing one bucket of weights to the engines, beside its transfer: what the field reports of
    whole publications (0.02 to 0.05 s a gigabyte) leaves about so much
    (`tests/plan/reported_times.py`)."""
    trainer_context: int = int(2.0 * GIB)
    """Driver context, collectives' buffers and kernels of a trainer process; stays while it sleeps.
    Small enough that the fullest of the layouts that are known to run fits."""
    engine_context: int = int(1.5 * GIB)
    """The same of an engine process."""
    engine_graphs: int = int(1.0 * GIB)
    """CUDA graphs of decoding; stay while it sleeps."""
    measured: frozenset[str] = frozenset()
    """Names of the constants above that were measured on such a device."""
    source: str = ""
    """Of those: the visit's results."""

    @property
    def asleep(self) -> int:
        """Bytes of a device that a sleeping engine keeps."""
        return self.engine_context + self.engine_graphs

    def says(self, name: str, text: str) -> str:
        """The figure as people read it, with its rank: `45 %`, or `41 % (measured)`."""
        return f"{text} (measured)" if name in self.measured else text


def reached(device: str) -> Reached:
    """`device` as `8xNAME` says."""
    row = dict(_table().get(device, {}))
    source = str(row.pop("source", ""))
    known = {field.name for field in fields(Reached)} - {"measured", "source"}
    assert row.keys() <= known, f"{FILE}: {sorted(row.keys() - known)} of {device}"
    whole = {
        name: int(value) for name, value in row.items() if name.endswith(("context", "graphs"))
    }
    return Reached(**{**row, **whole}, measured=frozenset(row), source=source)


@cache
def _table() -> dict[str, dict[str, object]]:
    return json.loads(FILE.read_text(encoding="utf-8"))
