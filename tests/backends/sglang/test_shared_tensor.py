"""Handles of device memory, as far as they can be looked at without a device; and when an engine
says that it has read."""

from __future__ import annotations

import base64
import inspect
import pickle
from types import SimpleNamespace

import torch
from torch.multiprocessing import reductions

from milescli.backends.sglang import settled, shared_tensor


def test_a_handle_names_its_device_by_what_is_the_same_under_every_visibility(monkeypatch):
    """torch numbers the device as the sender sees it; SGLang looks for a UUID in the same place."""
    arguments = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    place = arguments.index("storage_device")
    of_torch = tuple(
        3 if index == place else f"argument {index}" for index in range(len(arguments))
    )
    monkeypatch.setattr(
        reductions, "reduce_tensor", lambda tensor: (reductions.rebuild_cuda_tensor, of_torch)
    )
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(uuid=f"uuid of {device}"),
    )
    rebuild, sent = shared_tensor._Handle(SimpleNamespace(is_cuda=True)).__reduce__()
    assert rebuild is reductions.rebuild_cuda_tensor
    assert sent == (*of_torch[:place], "uuid of 3", *of_torch[place + 1 :])


def test_a_bucket_of_host_memory_opens_with_plain_pickle():
    flat = torch.arange(40, dtype=torch.uint8)
    opened = pickle.loads(base64.b64decode(shared_tensor.flat_bucket_payload(flat, [])))
    assert torch.equal(opened["flattened_tensor"], flat)
    flat.fill_(7)
    assert opened["flattened_tensor"].unique().tolist() == [7], "a copy was sent, not a handle"


def test_an_engine_answers_when_its_device_is_done(monkeypatch):
    happened: list[str] = []
    monkeypatch.setattr(torch.cpu, "synchronize", lambda: happened.append("the device is done"))

    def load(self, names, load_format=None):
        happened.append(f"copies of {names} are queued")
        return True, "Success"

    assert settled._then_wait(load)(SimpleNamespace(device="cpu"), "w") == (True, "Success")
    assert happened == ["copies of w are queued", "the device is done"]
