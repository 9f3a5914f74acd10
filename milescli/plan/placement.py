"""Places ranks on devices: trainer and engines on the same devices or on separate ones, and the
channel that carries weights between them. Pure; called by `make`."""

from __future__ import annotations

from milescli.core.errors import FitError
from milescli.plan.transport import PIECE_LOCATIONS
from milescli.plan.types import EngineLayout, Log, Slot, TrainerLayout
from milescli.platform.machine import Machine
from milescli.recipe.schema import Recipe


def devices_per_node(recipe: Recipe, machine: Machine, log: Log) -> int:
    """Return the number of devices of each node that the run uses; 0 means that it runs on the CPU.
    Raises FitError if the node has fewer than the recipe asks for."""
    wanted = recipe.machine.gpus
    visible = 0 if machine.kind == "cpu" else min(len(node.devices) for node in machine.nodes)
    if wanted == 0 or (wanted is None and visible == 0):
        log.note("device", "cpu", "`machine.gpus` is 0" if wanted == 0 else "no GPU is visible")
        return 0
    if wanted is None:
        log.note("device", f"{visible} x {machine.kind}", "all that are visible")
        return visible
    if wanted > visible:
        raise FitError(
            f"{wanted} GPUs per node are requested, but {visible} are visible",
            why=f"this machine is of kind {machine.kind}"
            + ("" if visible else " and has no GPU that miles can see"),
            fix=[
                f"--gpus {visible}" if visible else "leave --gpus out to run on the CPU",
                "miles doctor",
            ],
        )
    log.note("device", f"{wanted} x {machine.kind}", "pinned by `machine.gpus`")
    return wanted


def choose_placement(recipe: Recipe, num_devices: int | None) -> tuple[bool, str]:
    """Return (colocated, reason). `num_devices` is None on a CPU. Raises FitError."""
    if not recipe.has_engines:
        return True, "it learns from the rows of `data.train`: nothing is sampled"
    wanted, staleness = recipe.engines.placement, recipe.rollout.max_staleness
    shared = ["--set eval.engines=shared"] if recipe.eval.engines == "own" else []
    if recipe.engines_apart and num_devices is not None:
        if wanted == "colocated":
            raise FitError(
                "an engine that shares devices with the trainer cannot answer while the trainer "
                "works",
                why=f"{separate_engines_keys(recipe)}, but `engines.placement` is colocated",
                fix=["--set engines.placement=split", *shared],
            )
        if num_devices < 2 + recipe.engines_apart:
            raise FitError(
                f"engines for {separate_engines_purpose(recipe)} need more than {num_devices} "
                f"device{'s'[: num_devices > 1]}",
                why=f"{separate_engines_keys(recipe)}: the trainer, a sampling engine and "
                f"{recipe.engines_apart} for {separate_engines_purpose(recipe)} each need their "
                "own",
                fix=shared or "remove `policy` from `rollout.roles`",
            )
        return (
            False,
            f"{separate_engines_keys(recipe)}: these engines answer while the trainer works",
        )
    if recipe.adapters and num_devices is not None and (num_devices < 2 or wanted == "colocated"):
        raise FitError(
            "several adapters need engines and trainer on separate devices",
            why="while one adapter is trained, the engines sample for the others; "
            + ("there is one device" if num_devices < 2 else "they would share devices"),
            fix=["--gpus 2", "--set adapters={}   # one adapter at a time"]
            if num_devices < 2
            else "--set engines.placement=split",
        )
    if wanted != "auto":
        return wanted == "colocated", "pinned by `engines.placement`"
    if recipe.adapters:
        return False, "engines sample for one adapter while the trainer has another"
    if staleness > 0 and (num_devices is None or num_devices > 1):
        return False, f"max_staleness {staleness}: rollout runs while the trainer works"
    return True, "strictly on-policy steps take turns, so each gets all devices"


def assign_slots(
    trainer: TrainerLayout,
    engines: EngineLayout,
    colocated: bool,
    devices_per_node: int,
    num_nodes: int,
) -> list[Slot]:
    """Assign ranks to slots. Slot i holds trainer rank i; engine ranks take the same slots
    (colocated) or the following ones (split), such that no engine spans two nodes unnecessarily. On
    a CPU a node has as many slots as it takes to use all nodes. Raises FitError if there are fewer
    slots than ranks."""
    ranks, shards = trainer.world_size, engines.num * engines.tp
    unit = min(engines.tp, devices_per_node) if devices_per_node else 1
    offset = 0 if colocated else -(-ranks // unit) * unit
    num_slots = max(ranks, offset + shards)
    if not devices_per_node and num_slots < num_nodes:
        raise FitError(
            f"{num_nodes} nodes are requested, but the plan has only {num_slots} "
            f"slot{'s'[: num_slots > 1]} for them",
            why=f"trainer ranks {ranks}, engine ranks "
            f"{shards}{', which share slots' if colocated else ''}: each node needs at least "
            "one",
            fix=[f"--nodes {num_slots}", f"--set parallel.dp={num_nodes}"],
        )
    per_node = devices_per_node or -(-num_slots // num_nodes)
    slots = []
    for index in range(num_slots):
        shard = index - offset
        lives = 0 <= shard < shards
        slots.append(
            Slot(
                node=index // per_node,
                device=index % per_node,
                trainer_rank=index if index < ranks else None,
                engine=shard // engines.tp if lives else None,
                engine_rank=shard % engines.tp if lives else None,
            )
        )
    return slots


def note_idle_devices(slots: list[Slot], num_devices: int, recipe: Recipe, log: Log) -> None:
    """Log the devices that neither trainer nor engines use, with the reason."""
    used = sum(slot.trainer_rank is not None or slot.engine is not None for slot in slots)
    if used == num_devices:
        return
    pins = [
        f"{section}.{key}"
        for section, keys in (("parallel", ("tp", "pp", "cp", "dp")), ("engines", ("tp", "num")))
        for key in keys
        if getattr(getattr(recipe, section), key) is not None
    ]
    why = (
        f"pinned: {', '.join(pins)}"
        if pins
        else "no legal layout of trainer and engines takes them all, or none that fits"
    )
    log.note("idle devices", num_devices - used, why)


def choose_channel(
    recipe: Recipe, slots: list[Slot], *, colocated: bool, on_cpu: bool, log: Log
) -> str:
    """Choose the channel that carries weights to the engines. Raises FitError for a pin that cannot
    work, and if no channel carries all weights."""
    with_trainer = {slot.node for slot in slots if slot.trainer_rank is not None}
    alone = sorted({slot.node for slot in slots if slot.engine is not None} - with_trainer)
    if alone and recipe.weights.channel == "tensor":
        raise FitError(
            "weights cannot be passed in shared memory",
            why=f"engines on node {', '.join(map(str, alone))} have no trainer rank next to them",
            fix=["--set weights.channel=distributed", "--set engines.placement=colocated"],
        )
    channel = "distributed"
    why = "trainer and engines have devices of their own"
    if (named := recipe.weights.named_channel) != "auto":
        pin = "weights.store" if recipe.weights.channel == "auto" else "weights.channel"
        channel, why = named, f"pinned by `{pin}`"
        open_to_all = "; Mooncake listens on every address of a node, and asks for no key"
        why += open_to_all * (channel == "rdma")
    elif alone and colocated:
        why = f"engines on node {', '.join(map(str, alone))} have no trainer rank beside them"
    elif colocated:
        channel, why = (
            "tensor",
            "trainer and engines share devices: buckets are handed over in shared memory",
        )
    elif on_cpu and recipe.has_mtp and not alone:
        channel, why = "tensor", "an MTP layer is reached in shared memory alone"
    if channel == "distributed" and recipe.has_mtp:
        others = ["rollout.speculative.kind=ngram", "train.mtp.loss_weight=null"]
        raise FitError(
            "new weights would not reach the layer that guesses tokens",
            why="the weights go to engines on other devices over a channel on which SGLang "
            "updates only the model, not its MTP layer",
            fix=[
                "--set engines.placement=colocated",
                " ".join(f"--set {other}" for other in others),
            ],
        )
    log.note("weights.channel", channel, why)
    if recipe.weights.full_every > 1 and (place := PIECE_LOCATIONS.get(channel)) is not None:
        log.note("weights.full_every", 1, f"all weights are in {place} each time")
    if recipe.weights.wave_share < 1 and colocated and not on_cpu:
        log.note("weights.wave_share", 1, "engines that take turns with the trainer sleep together")
    return channel


def separate_engines_purpose(recipe: Recipe) -> str:
    """Return a phrase that says what the separate engines are for; it follows their number."""
    roles = "roles that other models play"
    if recipe.eval.engines != "own":
        return roles
    return f"evaluations and {roles}" if recipe.rollout.policies else "evaluations"


def separate_engines_keys(recipe: Recipe) -> str:
    """Return the recipe keys that reserve the separate engines."""
    keys = ["`eval.engines` is own"] if recipe.eval.engines == "own" else []
    keys += ["`rollout.roles` has a `policy`"] if recipe.rollout.policies else []
    return " and ".join(keys)
