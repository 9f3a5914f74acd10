"""Import stub on a CPU engine's PYTHONPATH: SGLang imports names of `sgl_kernel`, which has no CPU
wheel. Those of speculation are ours; a call of any other raises."""

from milescli.backends.sglang.inside.cpu import trees

__version__ = "0.0.0+miles.cpu.stub"


def __getattr__(name: str):
    """Return a kernel of any name: `from sgl_kernel import x` works, `x(...)` raises
    NotImplementedError."""
    if name.startswith("__"):
        raise AttributeError(name)
    if name in trees.KERNELS:
        return trees.KERNELS[name]

    def kernel(*args: object, **kwargs: object) -> None:
        raise NotImplementedError(
            f"sgl_kernel.{name} has no CPU form; the engine must not reach it on a CPU"
        )

    kernel.__name__ = name
    return kernel
