"""Stand-ins for packages that SGLang, or what it imports, imports at its start and never calls for
a text model on a CPU. Every name within a stand-in can be imported; a call raises."""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec

VERSION = "0.0.0+miles.cpu.stub"


class _Missing:
    """Stands in for any imported object: has every attribute; calling it raises."""

    def __init__(self, name):
        self.__name__ = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self.__name__}.{name}")

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(
            f"{self.__name__} has no CPU implementation here, and the engine must not call it on "
            "a CPU"
        )


class _Submodules(MetaPathFinder, Loader):
    """Imports `torchvision.transforms.v2.functional` and everything else below a stand-in."""

    def __init__(self):
        self.paths = []

    def find_spec(self, fullname, path, target=None):
        ours = any(path is known for known in self.paths)
        return ModuleSpec(fullname, self, is_package=True) if ours else None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        module.__path__ = sys.modules[module.__name__.partition(".")[0]].__path__
        module.__getattr__ = _Missing(module.__name__).__getattr__


_submodules = _Submodules()
sys.meta_path.append(_submodules)


def stand_in(name):
    """Turn an imported, empty module into a stand-in for the package of its name."""
    module = sys.modules[name]
    module.__version__ = VERSION
    module.__path__ = []
    module.__getattr__ = _Missing(name).__getattr__
    _submodules.paths.append(module.__path__)
