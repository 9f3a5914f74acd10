"""How fast ranks reach each other: the fast link within a node (or a rack), the network beyond.
Pure; called by `time`.

Groups are given by `ranks` and `stride`: every stride-th device, as Megatron spreads its axes over
neighbouring ranks."""

from __future__ import annotations

from dataclasses import dataclass

from milescli.plan.devices import DeviceSpec

LINK_SHARE = 0.65
"""Of a link's bandwidth that collectives reach. An estimate."""
NEAR_S, FAR_S = 20e-6, 60e-6
"""Of a collective, whatever its size: over the fast link alone, and over the network. Estimates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Of one kind of device, so many to a node."""

    device: DeviceSpec
    devices_per_node: int

    @property
    def near(self) -> int:
        """Neighbouring devices that the fast link spans."""
        return max(
            self.devices_per_node, self.device.link_domain if self.device.link_domain > 8 else 0
        )

    def spans_network(self, ranks: int, *, stride: int = 1) -> bool:
        """The group lies beyond the reach of the fast link."""
        return (ranks - 1) * stride >= self.near

    def start_s(self, ranks: int, *, stride: int = 1) -> float:
        """Seconds of a collective beside its bytes."""
        return FAR_S if self.spans_network(ranks, stride=stride) else NEAR_S

    def ring(self, ranks: int, *, stride: int = 1) -> float:
        """Bytes a second that a rank of an all-gather or reduce-scatter takes in. A ring crosses to
        the next node once, whatever it holds of the node before, and as many rings as the group has
        ranks there share the node's network adapters between them (NCCL's notion of bus bandwidth:
        nccl-tests, doc/PERFORMANCE.md)."""
        link = self.device.link_bandwidth
        if self.spans_network(ranks, stride=stride):
            link = min(link, max(1, self.near // stride) * self.device.network_bandwidth)
        return LINK_SHARE * link

    def exchange_s(self, sent: float, *, ranks: int, stride: int = 1) -> float:
        """Seconds of an all-to-all in which each rank sends `sent` bytes, those to itself counted:
        what stays within reach of the fast link, and beside it what goes out by the rank's own
        adapter."""
        inside = min(ranks, max(1, self.near // stride))
        within = sent * (inside - 1) / ranks / self.device.link_bandwidth
        beyond = sent * (ranks - inside) / ranks / self.device.network_bandwidth
        return max(within, beyond) / LINK_SHARE + self.start_s(ranks, stride=stride)

    def hop(self, stride: int) -> float:
        """Bytes a second from a rank to the one `stride` devices on."""
        return LINK_SHARE * (
            self.device.link_bandwidth if stride < self.near else self.device.network_bandwidth
        )

    def across(self, ranks: int) -> float:
        """Bytes a second from one rank to all others, each of which passes them on (a broadcast):
        as its own adapter allows."""
        return self.hop(self.near if ranks > self.near else 1)
