"""Devices: every machine that can be named has its figures, and a device that is not known is taken
for the weakest of its kind."""

from __future__ import annotations

from dataclasses import replace

import pytest

from milescli.plan.devices import DEVICES, pair_bandwidth, spec_of
from milescli.platform.machine import DEVICE_MODELS, parse_machine


def test_every_device_that_can_be_named_has_figures_with_a_source() -> None:
    assert set(DEVICES) == set(DEVICE_MODELS)
    for name, spec in DEVICES.items():
        assert spec_of(parse_machine(f"8x{name}")) == (spec, True), name
        assert spec.source
        assert spec.bf16_flops > 1e13
        assert spec.memory_bandwidth > spec.link_bandwidth >= spec.network_bandwidth > 0


def test_an_unknown_device_is_taken_for_one_of_its_architecture() -> None:
    machine = parse_machine("8xH100")
    odd = [replace(device, name="NVIDIA H800") for device in machine.nodes[0].devices]
    spec, known = spec_of(replace(machine, nodes=[replace(machine.nodes[0], devices=odd)]))
    assert (spec.name, known) == ("H100", False)


UNITS = {
    "A100": (108, 1.410e9, 2048),
    "H100": (132, 1.830e9, 4096),
    "MI300X": (304, 2.1e9, 2048),
    "MI325X": (304, 2.1e9, 2048),
    "MI350X": (256, 2.2e9, 4096),
    "MI355X": (256, 2.4e9, 4096),
}
"""Multiprocessors or compute units, their highest clock, and dense bf16 operations of one in a
clock: NVIDIA's A100 and H100 whitepapers, AMD's CDNA 3 and 4 whitepapers."""


@pytest.mark.parametrize("name", UNITS)
def test_the_peak_is_what_the_units_do_at_their_clock(name: str) -> None:
    units, clock_hz, operations = UNITS[name]
    assert DEVICES[name].bf16_flops == pytest.approx(units * clock_hz * operations, rel=0.002)


@pytest.mark.parametrize(("links", "both_ways", "names"), [
    (12, 50e9, ("A100", "A100-40GB")), (18, 50e9, ("H100", "H200")),
    (18, 100e9, ("B200", "B300", "GB200", "GB300")),
    (7, 128e9, ("MI300X", "MI325X")), (7, 153.6e9, ("MI350X", "MI355X")),
])  # fmt: skip
def test_a_device_sends_over_all_its_links_one_way(
    links: int, both_ways: float, names: tuple[str, ...]
) -> None:
    assert [DEVICES[name].link_bandwidth for name in names] == pytest.approx(
        [links * both_ways / 2] * len(names)
    )


def test_of_several_models_the_slowest_counts() -> None:
    machine = parse_machine("2xH100")
    slow = parse_machine("A100").nodes[0].devices
    mixed = replace(
        machine, nodes=[replace(machine.nodes[0], devices=[*machine.nodes[0].devices, *slow])]
    )
    assert spec_of(mixed) == (DEVICES["A100"], True)


def test_a_tray_of_gb300_has_four() -> None:
    machine = parse_machine("16x4xGB300")
    assert sum(len(node.devices) for node in machine.nodes) == 64


@pytest.mark.parametrize(
    ("model", "bandwidth"),
    [("A100", 300e9), ("H200", 450e9), ("B300", 900e9), ("MI300X", 64e9), ("MI355X", 76.8e9)],
)
def test_a_pair_of_devices_has_a_switch_or_one_link(model: str, bandwidth: float) -> None:
    assert pair_bandwidth(model) == pytest.approx(bandwidth)
    assert pair_bandwidth("L40S") is None
