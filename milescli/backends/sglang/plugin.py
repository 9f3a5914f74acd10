"""SGLang's plug-in entry point (group `sglang.srt.plugins`): what engines that miles started need
beyond stock SGLang.

SGLang calls `register()` in every process that loads it, also in those that miles did not start,
where it does nothing."""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import socket
import tempfile

ENGINE_VARIABLE = "MILES_ENGINE"
"""Set to the device kind (cpu, cuda, rocm) by EngineServer, in the environment of the engines that
it starts."""
EXACT_VARIABLE = "MILES_ENGINE_EXACT"
"""Set to 1 in the environment of engines on a CPU under `train.on_policy: exact`."""
GEMMA_IMAGES_VARIABLE = "MILES_ENGINE_GEMMA_IMAGES"
"""Set to 1 in the environment of engines that serve a Gemma 3 with its tower."""
INPUTS_VARIABLE = "MILES_ENGINE_INPUTS"
"""Set in the environment of engines on a CPU to the format in which the trainer rounds the inputs
of quantised layers, if it does."""
PIECES_VARIABLE = "MILES_ENGINE_PIECES"
"""Comma-separated modules of `cpu/` that the model needs beside those that every engine on a CPU
has."""


def register() -> None:
    """Install the changes of miles. If one does not fit, the process ends: an engine with half of
    them would sample incorrectly."""
    device_kind = os.environ.get(ENGINE_VARIABLE)
    if device_kind is None:
        return
    from milescli.backends.sglang.inside import (
        adapter,
        corrections,
        quantised,
        routing,
        shards,
        verify,
    )
    from milescli.backends.sglang.launch import key

    try:
        if api_key := key.take_key():
            key.install(api_key)
        # else what the collector cannot reach is reported below an engine's last words
        atexit.register(gc.unfreeze)
        _keep_load_file_with_the_process()
        _listen_on_given_address()
        _meet_at_reserved_ports()
        shards.install()  # before those that shall see its updates as any other
        quantised.install()  # before `verify`, whose orders begin no update
        verify.install()
        corrections.install()
        if os.environ.get(routing.ROUTING_VARIABLE) == "1":
            routing.install()
        if os.environ.get(adapter.ADAPTER_VARIABLE) == "1":
            adapter.install()
        if device_kind == "cpu":
            from milescli.backends.sglang.inside import cpu
            from milescli.platform import exact
            from milescli.platform.allocation import keep_freed_memory

            keep_freed_memory()
            if os.environ.get(EXACT_VARIABLE) == "1":
                exact.turn_on()
            cpu.install(tuple(filter(None, os.environ.get(PIECES_VARIABLE, "").split(","))))
        if os.environ.get(GEMMA_IMAGES_VARIABLE) == "1":
            from milescli.backends.sglang.inside import gemma_images

            gemma_images.install()
            if device_kind == "cpu":
                from milescli.backends.sglang.inside.cpu.attention import Batched

                Batched.images_see_themselves = True
    except Exception as error:  # SGLang would log it and go on; it does not catch SystemExit
        raise SystemExit(
            f"miles: its pieces do not fit this SGLang: {type(error).__name__}: {error}"
        ) from error


def _listen_on_given_address() -> None:
    """Make the store through which an engine's ranks find each other listen on its given address;
    by default torch listens on every interface."""
    # not `from torch.distributed import ...`, which gives a function of this name
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    plain = rendezvous.TCPStore

    def open_store(*, host_name: str, port: int, is_master: bool, **settings: object) -> object:
        if not is_master:
            return plain(host_name=host_name, port=port, is_master=False, **settings)
        listener = socket.create_server((host_name, port))
        bound = listener.getsockname()[1]
        return plain(
            host_name=host_name,
            port=bound,
            is_master=True,
            master_listen_fd=listener.detach(),
            **settings,
        )

    rendezvous.TCPStore = open_store  # type: ignore[attr-defined]


def _meet_at_reserved_ports() -> None:
    """Reserve the port through which an engine's ranks find each other. SGLang chooses a free port
    and binds it seconds later: by then an outgoing connection of another process may use it."""
    from sglang.srt import server_args

    from milescli.platform.ports import free_ports

    server_args.get_free_port = lambda: free_ports(1)[0]


def _keep_load_file_with_the_process() -> None:
    """Put SGLang's file of load figures, which it maps under /dev/shm and never removes, into the
    engine's own temporary folder, which EngineServer removes. Any file can be mapped."""
    from sglang.srt.managers import load_snapshot

    def path_in_temp_dir(ipc_name: str) -> str:
        return os.path.join(
            tempfile.gettempdir(), f"loads-{os.path.basename(ipc_name.rstrip('/')) or 'default'}"
        )

    load_snapshot.shm_path_for = path_in_temp_dir
