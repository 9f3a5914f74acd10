"""Reports what one node of a cluster knows of itself: devices, versions, interfaces, and whether it
can read a folder of the driver. Called on every node by `run_on_each_node`, and on the driver
itself; takes no device."""

from __future__ import annotations

import hashlib
import os
import platform as python_platform
import socket
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

import milescli
from milescli.platform.environment import INTERFACE_VARIABLES
from milescli.platform.machine import Machine
from milescli.platform.probe import probe

COMPARED_PACKAGES = ("torch", "sglang", "megatron-core", "ray", "transformers")
"""Packages that must be equal on all nodes, because nodes communicate in formats that differ
between versions."""
NODE_REPORT = "milescli.cluster.report:node_report"
HAS_NONCE = "milescli.cluster.report:has_nonce"
FOLDER_DIGEST = "milescli.cluster.report:folder_digest"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """Describes one node as it sees itself."""

    machine: Machine
    """Machine of one node."""
    versions: dict[str, str]
    """python, miles with a digest of its source, and `COMPARED_PACKAGES`; `missing` where one is
    not installed."""
    interfaces: dict[str, str]
    """Address -> name of the network interface that holds it."""
    variables: dict[str, str]
    """Variables of `INTERFACE_VARIABLES` that are set there."""


def node_report() -> NodeReport:
    """Report on this computer. Raises MachineError if its visibility variables contradict each
    other."""
    return NodeReport(
        machine=probe(),
        versions=_versions(),
        interfaces={
            address.address: name
            for name, addresses in psutil.net_if_addrs().items()
            for address in addresses
            if address.family in (socket.AF_INET, socket.AF_INET6)
        },
        variables={name: os.environ[name] for name in INTERFACE_VARIABLES if os.environ.get(name)},
    )


def _versions() -> dict[str, str]:
    versions = {
        "python": python_platform.python_version(),
        "miles": f"{milescli.__version__} ({_source_digest()})",
    }
    for name in COMPARED_PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "missing"
    return versions


def _source_digest() -> str:
    """Return a digest of all our own code: two checkouts of one version may differ."""
    folder, digest = Path(milescli.__file__).parent, hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(str(file.relative_to(folder)).encode() + file.read_bytes())
    return digest.hexdigest()[:8]


def has_nonce(*, file: str, nonce: str) -> bool:
    """Return True if this node can read what the driver wrote."""
    try:
        return Path(file).read_text(encoding="utf-8") == nonce
    except OSError:
        return False


def folder_digest(*, folder: str) -> str:
    """Digest names, sizes and small files of a model folder, so that equal copies on local disks
    count as equal. Returns an empty text if there is no such folder."""
    digest, files = hashlib.sha256(), [file for file in Path(folder).glob("*") if file.is_file()]
    for file in sorted(files):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        if file.suffix == ".json" and size < 2**20:
            digest.update(file.read_bytes())
    return digest.hexdigest() if files else ""
