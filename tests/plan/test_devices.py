"""Devices: every machine that can be named has its figures, and a device that is not known is taken for the weakest of its kind."""

from __future__ import annotations

from dataclasses import replace

from milescli.plan.devices import DEVICES, spec_of
from milescli.platform.machine import DEVICE_MODELS, parse_machine


def test_every_device_that_can_be_named_has_figures_with_a_source() -> None:
    assert set(DEVICES) == set(DEVICE_MODELS)
    for name, spec in DEVICES.items():
        assert spec_of(parse_machine(f"8x{name}")) == (spec, True), name
        assert spec.source
        assert spec.fp8_flops >= spec.bf16_flops > 1e13
        assert spec.memory_bandwidth > spec.link_bandwidth >= spec.network_bandwidth > 0


def test_an_unknown_device_is_taken_for_one_of_its_architecture() -> None:
    machine = parse_machine("8xH100")
    odd = [replace(device, name="NVIDIA H800") for device in machine.nodes[0].devices]
    spec, known = spec_of(replace(machine, nodes=[replace(machine.nodes[0], devices=odd)]))
    assert (spec.name, known) == ("H100", False)


def test_a_tray_of_gb300_has_four() -> None:
    machine = parse_machine("16x4xGB300")
    assert sum(len(node.devices) for node in machine.nodes) == 64
