"""Runs a script of a Megatron-LM checkout on the CPU: `on_cpu.py CHECKOUT/pretrain_gpt.py ARGUMENTS`.

Not a byte of the checkout is changed. What its modules want only to be imported, and never call on this path (triton),
is stood in for, beside what the CPU does in place of CUDA (examples/cpu_stand_in.py).
"""

from __future__ import annotations

import contextlib
import gc
import glob
import hashlib
import importlib.util
import os
import runpy
import signal
import sys
import threading
import time
import types
import typing
from collections import defaultdict
from importlib.machinery import ModuleSpec
from typing import Any, ClassVar

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "..", "examples"))

import torch  # noqa: E402
from torch.utils._triton import has_triton_package  # noqa: E402

STUBS = ("triton", "triton.language", "triton.language.extra", "triton.language.extra.libdevice")


class Stub(types.ModuleType):
    """Has every name; a function of it used as a decorator leaves the function as it is."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **_options: args[0] if args and callable(args[0]) else (lambda function: function)


def stand_in() -> None:
    """For CUDA, for what isn't installed, and for what Megatron-LM uses of Python 3.12."""
    if not hasattr(typing, "override"):
        typing.override = lambda method: method  # type: ignore[attr-defined]
    has_triton_package()  # torch remembers that it isn't there
    for name in STUBS:
        if "triton" not in sys.modules or isinstance(sys.modules["triton"], Stub):
            sys.modules[name] = stub = Stub(name)
            stub.__spec__ = ModuleSpec(name, None, is_package=True)
            parent, _, last = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], last, stub)
    sys.modules["triton"].__version__ = "3.4.0"
    import cpu_stand_in

    cpu_stand_in._FACTORIES += ("rand", "randn", "full", "arange", "empty_like")
    cpu_stand_in.install()
    cuda: Any = torch.cuda
    # two that differ, for two ranks of a node: Megatron's rerun state machine compares them
    cuda.current_device = lambda: torch.device("cpu") if os.environ["LOCAL_RANK"] == "0" else torch.device("cpu", 0)
    cuda.set_device = lambda *_: None
    cuda.device_count = lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cuda.is_available = lambda: True  # Megatron asks before anything else
    _use_built_helper()
    with contextlib.suppress(ImportError):  # gone in newer ones
        importlib.import_module("megatron.legacy.fused_kernels").load = lambda *_: None
    with contextlib.suppress(ImportError):  # the newest ones' names a GPU by its number
        injector: Any = importlib.import_module("megatron.core.fault_injector")
        injector.torch = types.SimpleNamespace(**{**vars(torch), "device": lambda *_: torch.device("cpu")})
    noop = lambda *_args, **_options: None  # noqa: E731
    for name in ("empty_cache", "reset_peak_memory_stats", "set_stream", "nvtx.range_push", "nvtx.range_pop"):
        owner, _, last = name.rpartition(".")
        setattr(getattr(cuda, owner) if owner else cuda, last, noop)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, lambda *_: 0)
    cuda.memory_stats = lambda *_: defaultdict(int)
    cuda.Stream = cuda.current_stream = cuda.default_stream = lambda *_args, **_options: Stub("stream")
    cuda.stream = lambda *_: contextlib.nullcontext()
    cuda.get_device_properties = lambda *_: types.SimpleNamespace(major=8, minor=0, multi_processor_count=1, name="cpu")
    cuda.get_device_capability = lambda *_: (8, 0)
    pinned: Any = torch.Tensor
    pinned.pin_memory = lambda tensor, *_: tensor  # a torch that is built for CUDA asks for the driver
    health: Any = torch.optim.Optimizer
    health._accelerator_graph_capture_health_check = health._cuda_graph_capture_health_check = lambda _: None


def _use_built_helper() -> None:
    """A checkout would compile it, into itself; the installed megatron-core has it, wherever that is installed."""
    helper = os.path.join("megatron", "core", "datasets", "helpers_cpp*.so")
    found = [path for directory in sys.path for path in glob.glob(os.path.join(directory, helper))]
    if found:
        name = "megatron.core.datasets.helpers_cpp"
        spec = importlib.util.spec_from_file_location(name, found[0])
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        importlib.import_module("megatron.core.datasets.utils").compile_helpers = lambda: None


del sys.argv[0]
sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))  # before any megatron-core that is installed
stand_in()


def fail_as_asked() -> None:
    """ON_CPU_FAULT=signal;rank;iteration[;save]: in cycle 0, in that iteration, or while its checkpoint is written.

    "NaN" as the signal: that many iterations leave a weight that is no number.
    """
    name, rank, iteration, *when = os.environ["ON_CPU_FAULT"].split(";")
    if (os.environ["RANK"], os.environ["FT_CYCLE"]) != (rank, "0"):
        return
    if name == "NaN":
        spoil_weights(int(iteration))
        return

    def watch() -> None:
        while True:
            args = getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
            if args is not None:
                in_save = os.path.isdir(os.path.join(args.save, f"iter_{int(iteration):07d}"))
                if in_save if when else getattr(args, "curr_iteration", -1) >= int(iteration):
                    os.kill(os.getpid(), getattr(signal, name))
            time.sleep(0.001)

    threading.Thread(target=watch, daemon=True).start()


def spoil_weights(steps: int) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    left = iter(range(steps - 1, -1, -1))

    def spoil(optimizer: Any, _arguments: Any, _named: Any) -> None:
        if next(left, None) == 0:
            with torch.no_grad():
                optimizer.param_groups[0]["params"][0].view(-1)[0] = float("nan")

    register_optimizer_step_post_hook(spoil)


def weights() -> str:
    """A digest of the parameters of all models in this process."""
    models = [each for each in gc.get_objects() if type(each).__name__ == "GPTModel"]
    digest = hashlib.sha256()
    for model in models:
        for name, parameter in sorted(model.named_parameters()):
            digest.update(name.encode() + parameter.detach().numpy().tobytes())
    return f"{len(models)} {digest.hexdigest()}"


if __name__ == "__main__":
    if os.environ.get("ON_CPU_FAULT"):
        fail_as_asked()
    if os.environ["FT_CYCLE"] != "0":
        os.environ.pop("FT_SIM_FAULT_DESC", None)  # else it fails in every cycle, at the same moment
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.stdout.write(f"weights of rank {os.environ['RANK']}: {weights()}\n")
