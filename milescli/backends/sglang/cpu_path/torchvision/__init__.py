"""Stands before the real torchvision on a CPU engine's PYTHONPATH, and becomes it.

The torchvision wheel on PyPI is built for CUDA: beside a CPU build of torch its C++ library does
not load, and its import then fails because two operators lack a schema. SGLang imports it first
thing. Here the schemas are declared where they are missing, and the real package is then loaded in
this module's place. No operator is implemented, and no text model calls one.
"""

import sys as _sys
from importlib.machinery import PathFinder as _PathFinder
from pathlib import Path as _Path

import torch as _torch


def _real_spec():
    here = _Path(__file__).resolve().parent.parent
    others = [entry for entry in _sys.path if _Path(entry or ".").resolve() != here]
    spec = _PathFinder.find_spec("torchvision", others)
    if spec is None or spec.loader is None or spec.origin is None:
        raise ModuleNotFoundError(
            "torchvision is not installed: pip install --no-deps torchvision==0.28.0",
            name="torchvision",
        )
    return spec


def _declare_missing_schemas(package: _Path):
    try:
        _torch.ops.load_library(str(package / "_C.so"))
    except OSError:  # built for another device: declare what the import needs
        library = _torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return library
    return None


_spec = _real_spec()
_miles_library = _declare_missing_schemas(_Path(_spec.origin).parent)
"""Kept alive: the schemas go when it goes."""
__spec__, __file__, __path__ = _spec, _spec.origin, list(_spec.submodule_search_locations or [])
_spec.loader.exec_module(_sys.modules[__name__])
