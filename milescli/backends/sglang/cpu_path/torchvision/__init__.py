"""Import stand-in on a CPU engine's PYTHONPATH: SGLang imports names of `torchvision` first thing,
and PyPI has builds for CUDA alone. Every name below it can be imported; a call raises, and no text
model makes one. transformers, which looks for it too, imports it then, and calls nothing either.
"""

import sys as _sys
from importlib.abc import Loader as _Loader
from importlib.abc import MetaPathFinder as _MetaPathFinder
from importlib.machinery import ModuleSpec as _ModuleSpec

__version__ = "0.0.0+miles.cpu.stub"


class _Missing:
    """What is imported: has every attribute, and does nothing."""

    def __init__(self, name):
        self.__name__ = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self.__name__}.{name}")

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(
            f"{self.__name__} has no CPU form here; the engine must not reach it on a CPU"
        )


class _Submodules(_MetaPathFinder, _Loader):
    """`torchvision.transforms.v2.functional` and all others."""

    def find_spec(self, fullname, path, target=None):
        return _ModuleSpec(fullname, self, is_package=True) if path is __path__ else None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        module.__path__ = __path__
        module.__getattr__ = _Missing(module.__name__).__getattr__


__path__ = []
__getattr__ = _Missing(__name__).__getattr__
_sys.meta_path.append(_Submodules())
