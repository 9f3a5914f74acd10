"""Import stub on a CPU engine's PYTHONPATH: SGLang imports names of `sgl_kernel`, which has no CPU
wheel. A call raises."""

__version__ = "0.0.0+miles.cpu.stub"


def __getattr__(name: str):
    """Any kernel, by name; `from sgl_kernel import x` works, `x(...)` raises
    NotImplementedError."""
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*args: object, **kwargs: object) -> None:
        raise NotImplementedError(
            f"sgl_kernel.{name} has no CPU form; the engine must not reach it on a CPU"
        )

    kernel.__name__ = name
    return kernel
