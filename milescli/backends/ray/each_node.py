"""Runs the same function on every node of a Ray cluster: doctor and launch learn from it what each
node has. Takes no device and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from milescli.backends.ray.joining import join
from milescli.backends.ray.nodes import ClusterNode, living_nodes
from milescli.core.errors import MachineError, MilesError, WaitTimeout, WorkerDied


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeResult:
    """Holds the result of the function on one node, or the error that explains why there is
    none."""

    node: ClusterNode
    result: Any = None
    error: MilesError | None = None


def run_on_each_node(
    address: str,
    target: str,
    kwargs: Mapping[str, object] | None = None,
    *,
    timeout_s: float,
    only: Sequence[str] | None = None,
) -> list[NodeResult]:
    """Call `module:function` of `target` with `kwargs` on every living node at once. Return the
    results, that of the driver's node first, the others by address.

    Uses the cluster that this process has joined already; otherwise joins the one at `address`, and
    leaves it again. `only`: ids of the nodes to call. `timeout_s` bounds the whole call: a node
    that has not answered by then has a WaitTimeout as its error. Raises MachineError if the cluster
    cannot be joined."""
    with joined(address):
        nodes = [node for node in living_nodes() if only is None or node.node_id in only]
        return _ask(nodes, target, dict(kwargs or {}), timeout_s)


@contextmanager
def joined(address: str) -> Iterator[None]:
    """Join the cluster within the context, unless the process has already joined it."""
    import ray

    if ray.is_initialized():
        yield
        return
    join(address)
    try:
        yield
    finally:
        ray.shutdown()


def _ask(
    nodes: list[ClusterNode], target: str, kwargs: dict[str, object], timeout_s: float
) -> list[NodeResult]:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    call = ray.remote(_portable())
    requests = [
        call.options(
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node.node_id, soft=False),
        ).remote(target, kwargs)
        for node in nodes
    ]
    done, late = ray.wait(requests, num_returns=len(requests), timeout=timeout_s)
    for ref in late:
        ray.cancel(ref, force=True)
    return [
        _answer(node, ref, target, timeout_s if ref not in done else None)
        for node, ref in zip(nodes, requests, strict=True)
    ]


def _answer(node: ClusterNode, ref: Any, target: str, waited_s: float | None) -> NodeResult:
    import ray

    if waited_s is not None:
        late = WaitTimeout(
            f"{node} did not answer",
            why=f"`{target}` was requested {waited_s:.0f} s ago, and Ray still considers the "
            "node alive",
            fix=[
                "ray status   # is the node overloaded or unreachable?",
                f"ssh {node.address} ray stop   # remove it from the cluster",
            ],
        )
        return NodeResult(node=node, error=late)
    try:
        result, error = ray.get(ref)
    except Exception as failure:  # whatever kept the function from running at all
        why = f"{type(failure).__name__}: {str(failure).strip().splitlines()[-1]}"
        died = WorkerDied(
            f"{node} could not run `{target}`",
            why=why,
            fix="ray status   # is it still in the cluster?",
        )
        return NodeResult(node=node, error=died)
    if isinstance(error, str):
        error = MachineError(
            f"{node} failed at `{target}`",
            why=error,
            fix="every node must start Ray from the same Python environment, which contains "
            "miles: ray stop && ray start --address=...",
        )
    return NodeResult(node=node, result=result, error=error)


def _portable() -> Callable[[str, dict[str, object]], tuple[object, object]]:
    """Return a function that is pickled as code, because it is defined inside this one, and
    therefore runs on a node without miles, or with another version."""

    def call(target: str, kwargs: dict[str, object]) -> tuple[object, object]:
        import importlib

        try:
            module, _, name = target.partition(":")
            return getattr(importlib.import_module(module), name)(**kwargs), None
        except Exception as error:
            whole = hasattr(error, "fixes")  # a MilesError crosses the border whole
            return None, error if whole else f"{type(error).__name__}: {error}"

    return call
