"""Data sheets of accelerators: FLOP/s, memory bandwidth, links, each figure with its source; and
the share of these that runs achieve. Pure."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path

from milescli.core.files import read_json
from milescli.core.units import GIB
from milescli.platform.machine import DEVICE_MODELS, Machine, model_of

TERA, GIGA = 1e12, 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """Specifies one device according to its maker's data sheet. Rates are dense (no sparsity) and
    peak."""

    name: str
    """Name as in `8xNAME`."""
    bf16_flops: float
    """Floating-point operations per second, bf16 products accumulated in float32."""
    memory_bandwidth: float
    """Bytes per second."""
    link_bandwidth: float
    """Bytes per second that a device sends to the others of its node, one way."""
    network_bandwidth: float
    """Bytes per second that a device sends to other nodes, one way, in the maker's reference
    system."""
    link_domain: int = 8
    """Most devices that reach each other over the fast link (NVLink spans 72 of a GB200 or GB300
    rack)."""
    source: str
    """Source of all figures."""


_CONNECTX7 = 50 * GIGA
"""400 Gbit/s per device: DGX H100/H200/B200 and AMD's 8-GPU reference designs have one such adapter
for each."""
_CONNECTX8 = 100 * GIGA
XGMI_PEERS = 7
"""Other devices of a node; each of AMD's has one Infinity Fabric link to each of them."""


_A100 = DeviceSpec(
    name="A100",
    bf16_flops=312 * TERA,
    memory_bandwidth=2.039e12,
    link_bandwidth=300 * GIGA,
    network_bandwidth=25 * GIGA,
    source="NVIDIA A100 Tensor Core GPU data sheet (SXM 80 GB); DGX A100 data sheet (200 Gbit/s a "
    "GPU)",
)
_L40S = DeviceSpec(
    name="L40S",
    bf16_flops=362 * TERA,
    memory_bandwidth=864 * GIGA,
    link_bandwidth=32 * GIGA,
    network_bandwidth=25 * GIGA,
    source="NVIDIA L40S data sheet (PCIe 4.0 x16); network: 200 Gbit/s a GPU assumed",
)
_RTX4090 = DeviceSpec(
    name="RTX4090",
    bf16_flops=165.2 * TERA,
    memory_bandwidth=1008 * GIGA,
    link_bandwidth=32 * GIGA,
    network_bandwidth=12.5 * GIGA,
    source="NVIDIA Ada GPU architecture whitepaper, appendix A (float32 accumulation; PCIe 4.0 "
    "x16); network: 100 Gbit/s assumed",
)
_H100 = DeviceSpec(
    name="H100",
    bf16_flops=989 * TERA,
    memory_bandwidth=3.35e12,
    link_bandwidth=450 * GIGA,
    network_bandwidth=_CONNECTX7,
    source="NVIDIA H100 Tensor Core GPU data sheet (SXM); DGX H100 data sheet",
)
_B200 = DeviceSpec(
    name="B200",
    bf16_flops=2250 * TERA,
    memory_bandwidth=8e12,
    link_bandwidth=900 * GIGA,
    network_bandwidth=_CONNECTX7,
    source="NVIDIA DGX B200 data sheet (72 PFLOP/s fp8 and 36 bf16 with sparsity over 8 GPUs, 64 "
    "TB/s, 14.4 TB/s NVLink)",
)
_GB200 = replace(
    _B200,
    name="GB200",
    bf16_flops=2500 * TERA,
    link_domain=72,
    source="NVIDIA GB200 NVL72 data sheet (720 PFLOP/s fp8 and 360 bf16 with sparsity, 576 TB/s, "
    "130 TB/s NVLink over 72 GPUs of 1200 W)",
)
_MI300X = DeviceSpec(
    name="MI300X",
    bf16_flops=1307.4 * TERA,
    memory_bandwidth=5.3e12,
    link_bandwidth=XGMI_PEERS * 64 * GIGA,
    network_bandwidth=_CONNECTX7,
    source="AMD Instinct MI300X data sheet (304 CUs at 2.1 GHz; 7 xGMI links of 128 GB/s both "
    "ways)",
)
_MI350X = DeviceSpec(
    name="MI350X",
    bf16_flops=2306.9 * TERA,
    memory_bandwidth=8e12,
    link_bandwidth=XGMI_PEERS * 76.8 * GIGA,
    network_bandwidth=_CONNECTX7,
    source="AMD Instinct MI350X data sheet (256 CUs at 2.2 GHz; 7 xGMI links of 153.6 GB/s both "
    "ways)",
)

DEVICES: dict[str, DeviceSpec] = {
    spec.name: spec
    for spec in (
        _A100,
        replace(
            _A100,
            name="A100-40GB",
            memory_bandwidth=1.555e12,
            source="NVIDIA A100 Tensor Core GPU data sheet (SXM 40 GB); DGX A100 data sheet (200 "
            "Gbit/s a GPU)",
        ),
        _L40S,
        _RTX4090,
        _H100,
        replace(
            _H100,
            name="H200",
            memory_bandwidth=4.8e12,
            source="NVIDIA H200 Tensor Core GPU data sheet (SXM); DGX H200 data sheet",
        ),
        _B200,
        replace(
            _B200,
            name="B300",
            network_bandwidth=_CONNECTX8,
            source="NVIDIA DGX B300 data sheet (72 PFLOP/s fp8 with sparsity over 8 GPUs, 14.4 "
            "TB/s NVLink, ConnectX-8 of 800 Gbit/s a GPU); bf16 half of fp8",
        ),
        _GB200,
        replace(
            _GB200,
            name="GB300",
            network_bandwidth=_CONNECTX8,
            source="NVIDIA GB300 NVL72 data sheet (720 PFLOP/s fp8 and 360 bf16 with sparsity, 576 "
            "TB/s over 72 GPUs; ConnectX-8, 800 Gbit/s)",
        ),
        _MI300X,
        replace(
            _MI300X,
            name="MI325X",
            memory_bandwidth=6e12,
            source="AMD Instinct MI325X data sheet (compute and links as MI300X)",
        ),
        _MI350X,
        replace(
            _MI350X,
            name="MI355X",
            bf16_flops=2516.6 * TERA,
            source="AMD Instinct MI355X data sheet (256 CUs at 2.4 GHz; 7 xGMI links of 153.6 GB/s "
            "both ways)",
        ),
    )
}
"""Figures from the makers' sheets, if figures that others quote agree with them (Blackwell: 2250
and 4500 TFLOP/s at 1000 W, 2500 and 5000 at 1200 W and in a GB300) and, if clocks are published,
units x operations per clock x clock (tests/plan/test_devices.py). B200 in HGX servers of other
makers has 7.7 TB/s."""

CPU_CORE = DeviceSpec(
    name="CPU",
    bf16_flops=0.05 * TERA,
    memory_bandwidth=10 * GIGA,
    link_bandwidth=5 * GIGA,
    network_bandwidth=1 * GIGA,
    source="one core at 3 GHz with 16 float32 multiply-adds a cycle, halved; memory of a server "
    "shared by its cores: an estimate",
)

_ARCHS = {
    "sm_80": "A100",
    "sm_89": "L40S",
    "sm_90": "H100",
    "sm_100": "B200",
    "sm_103": "B300",
    "gfx942": "MI300X",
    "gfx950": "MI350X",
}
"""Device to assume for an unknown name: the weakest of its architecture in the table."""


def spec_of(machine: Machine) -> tuple[DeviceSpec, bool]:
    """Return (the specification of a machine's devices, whether their name is known). An unknown
    device gets the specification of its architecture, else the A100's. Among several models the
    slowest counts, since the others wait for it. For a CPU the result describes one core."""
    devices = {
        (device.name, device.arch): device for node in machine.nodes for device in node.devices
    }
    if machine.kind == "cpu" or not devices:
        return CPU_CORE, True
    names = [(model_of(device), device.arch) for device in devices.values()]
    specs = [(DEVICES[name or _ARCHS.get(arch, "A100")], name is not None) for name, arch in names]
    return min(specs, key=lambda spec: (spec[0].bf16_flops, spec[0].memory_bandwidth))


def pair_bandwidth(model: str) -> float | None:
    """Return the bandwidth from one device of this model to another of its node, in bytes per
    second, one way: NVLink's switches give a pair the whole bandwidth of a device, xGMI gives it
    one link of seven. None over PCIe."""
    interconnect, whole = DEVICE_MODELS[model].interconnect, DEVICES[model].link_bandwidth
    return {"nvlink": whole, "xgmi": whole / XGMI_PEERS}.get(interconnect)


LINK_SHARE = 0.65
"""Share of a link's bandwidth that collectives achieve. An estimate."""
NEAR_S, FAR_S = 20e-6, 60e-6
"""Seconds that a collective takes whatever its size: over the fast link, and over the network.
Estimates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Models the interconnect of one kind of device, for a given number of devices per node."""

    device: DeviceSpec
    devices_per_node: int

    @property
    def near(self) -> int:
        """Return the number of devices that the fast link connects."""
        return max(
            self.devices_per_node, self.device.link_domain if self.device.link_domain > 8 else 0
        )

    def spans_network(self, ranks: int, *, stride: int = 1) -> bool:
        """Return True if the group reaches beyond the fast link."""
        return (ranks - 1) * stride >= self.near

    def start_s(self, ranks: int, *, stride: int = 1) -> float:
        """Return the latency of a collective in seconds, without the transfer of its bytes."""
        return FAR_S if self.spans_network(ranks, stride=stride) else NEAR_S

    def ring(self, ranks: int, *, stride: int = 1) -> float:
        """Return the bytes per second that a rank of an all-gather or reduce-scatter receives. A
        ring crosses to the next node once, and as many rings as the group has ranks on a node share
        its network adapters (NCCL's bus bandwidth: nccl-tests, doc/PERFORMANCE.md)."""
        link = self.device.link_bandwidth
        if self.spans_network(ranks, stride=stride):
            link = min(link, max(1, self.near // stride) * self.device.network_bandwidth)
        return LINK_SHARE * link

    def exchange_s(self, sent: float, *, ranks: int, stride: int = 1) -> float:
        """Return the seconds of an all-to-all in which each rank sends `sent` bytes, including
        those to itself: part goes over the fast link, and at the same time the rest goes out
        through the rank's own adapter."""
        inside = min(ranks, max(1, self.near // stride))
        within = sent * (inside - 1) / ranks / self.device.link_bandwidth
        beyond = sent * (ranks - inside) / ranks / self.device.network_bandwidth
        return max(within, beyond) / LINK_SHARE + self.start_s(ranks, stride=stride)

    def hop(self, stride: int) -> float:
        """Return the bytes per second from a rank to the rank `stride` devices away."""
        return LINK_SHARE * (
            self.device.link_bandwidth if stride < self.near else self.device.network_bandwidth
        )

    def broadcast(self, ranks: int) -> float:
        """Return the bytes per second of a broadcast from one rank to all others, each of which
        forwards the data; the first rank's own adapter bounds it."""
        return self.hop(self.near if ranks > self.near else 1)


FILE = Path(__file__).with_name("measured.json")
"""{device as in `8xNAME`: {"source": ..., constant of Efficiency: value, ...}}"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Holds the share of peak rates, and the fixed costs, that runs achieve on one kind of device.
    The defaults are estimates."""

    train_share: float = 0.45
    """Share of peak FLOP/s that a dense layer's matrix products achieve in training, without
    communication."""
    expert_share: float = 0.30
    """Share of peak FLOP/s that experts' matrix products, which are small and many, achieve in
    training."""
    prefill_share: float = 0.45
    """Share of peak FLOP/s that prefill achieves."""
    decode_share: float = 0.70
    """Share of memory bandwidth that decoding achieves. The one published figure implies 0.65 to
    0.9 (`tests/plan/reported_times.py`)."""
    layer_s: float = 0.4e-3
    """Seconds to launch the kernels of one layer forward and backward, per microbatch: the cost of
    small microbatches."""
    decode_step_s: float = 2e-3
    """Seconds to schedule and sample one decode step, at any batch size."""
    host_bandwidth: float = 25e9
    """Bytes per second between a device and its host's memory (PCIe 5.0 x16 has 64e9)."""
    host_adam: float = 0.5e9
    """Parameters per second that a rank's share of the host's cores updates by Adam."""
    bucket_s: float = 0.01
    """Seconds to pass one bucket of weights to the engines, besides its transfer: published times
    of whole publications (0.02 to 0.05 s per gigabyte) leave about this
    (`tests/plan/reported_times.py`)."""
    trainer_context: int = int(2.0 * GIB)
    """Driver context, buffers of collectives and kernels of a trainer process; they remain while it
    sleeps. Small enough that the fullest layout that is known to run fits."""
    engine_context: int = int(1.5 * GIB)
    """Driver context, buffers of collectives and kernels of an engine process."""
    engine_graphs: int = int(1.0 * GIB)
    """CUDA graphs of decoding; they remain while the engine sleeps."""
    measured: frozenset[str] = frozenset()
    """Names of the constants above that were measured on such a device."""
    source: str = ""
    """Source of the measured constants: the visit's results."""

    @property
    def asleep(self) -> int:
        """Return the bytes on the device that a sleeping engine still occupies."""
        return self.engine_context + self.engine_graphs

    def format_constant(self, name: str, text: str) -> str:
        """Return a constant's value `text` for people, marked if it was measured: `45 %`, or `41 %
        (measured)`."""
        return f"{text} (measured)" if name in self.measured else text


def efficiency_of(device: str) -> Efficiency:
    """Return the constants of a device, named as in `8xNAME`."""
    row = dict(_table().get(device, {}))
    source = str(row.pop("source", ""))
    known = {field.name for field in fields(Efficiency)} - {"measured", "source"}
    assert row.keys() <= known, f"{FILE}: {sorted(row.keys() - known)} of {device}"
    whole = {
        name: int(value) for name, value in row.items() if name.endswith(("context", "graphs"))
    }
    return Efficiency(**{**row, **whole}, measured=frozenset(row), source=source)


@cache
def _table() -> dict[str, dict[str, object]]:
    return read_json(FILE)
