"""Random numbers in a script that is run ahead: what it seeds stays, what nobody seeds differs from rank to rank."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

__all__ = ["Randomness"]

_TORCH = (
    *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"),
    *("normal", "bernoulli", "multinomial", "poisson", "seed", "initial_seed", "get_rng_state"),
)
_TENSOR = (
    *("uniform_", "normal_", "random_", "bernoulli_", "exponential_", "geometric_", "cauchy_", "log_normal_"),
    *("bernoulli", "multinomial"),
)


class Randomness:
    """The generators that Python, numpy and torch share within a process."""

    def __init__(self, draw: Callable[[str], None], draw_if_users: Callable[[str], None]) -> None:
        """``draw`` is called before the first number is taken from a generator that nobody has seeded.

        ``draw_if_users``: before another one is made from the system's, which a library may do for itself.
        """
        self._draw = draw
        self._draw_if_users = draw_if_users
        self._seeded: set[str] = set()
        self._torch_state: Any = None

    def hooks(self) -> dict[str, Callable[[Any, Callable[..., None]], None]]:
        """By module, what to do with it when it has been imported; the second argument replaces a function."""
        return {"random": self._python, "numpy.random": self._numpy, "torch": self._torch}

    def _python(self, module: Any, replace: Callable[..., None]) -> None:
        replace(module.Random, "seed", self._before_seed)
        for name, function in list(vars(module).items()):
            if getattr(function, "__self__", None) is module._inst:
                replace(module, name, self._before("random", name))

    def _numpy(self, module: Any, replace: Callable[..., None]) -> None:
        generator = module.mtrand._rand
        for name, function in list(vars(module).items()):
            if getattr(function, "__self__", None) is generator or name in ("seed", "ranf", "sample"):
                replace(module, name, self._before("numpy.random", name))

    def _torch(self, module: Any, replace: Callable[..., None]) -> None:
        self._torch_state = module.default_generator.initial_seed(), module.default_generator.get_state()
        for owner, names in ((module, _TORCH), (module.Tensor, _TENSOR)):
            for name in names:
                if hasattr(owner, name):
                    replace(owner, name, self._before("torch", name))

    def _before(self, generator: str, name: str) -> Callable[..., None]:
        if name in ("setstate", "set_state", "set_bit_generator"):
            return lambda *_arguments, **_named: self._seeded.add(generator)

        def before(*arguments: Any, **named: Any) -> None:
            if name == "seed" and generator != "torch" and (arguments or named):
                self._seeded.add(generator)
            elif not self._is_seeded(generator) and named.get("generator") is None:
                self._draw(f"draws random numbers ({generator}.{name}) that nobody has seeded")

        return before

    def _before_seed(self, _generator: Any, a: Any = None, *_more: Any, **_named: Any) -> None:
        if a is None:
            self._draw_if_users("draws random numbers (random.Random)")

    def _is_seeded(self, generator: str) -> bool:
        if generator == "torch":
            # manual_seed and fork_rng are C++'s own business: the seed tells
            return bool(sys.modules["torch"].default_generator.initial_seed() != self._torch_state[0])
        return generator in self._seeded

    def why_spoiled(self) -> str | None:
        """Whether torch, in C++, has drawn numbers that would be the same in all ranks."""
        if self._torch_state is None or self._is_seeded("torch"):
            return None
        torch: Any = sys.modules["torch"]
        is_same = torch.equal(torch.default_generator.get_state(), self._torch_state[1])
        return None if is_same else "it has drawn random numbers that nobody has seeded"

    def freshen(self) -> None:
        """In a new rank: new seeds for those that nobody has seeded."""
        if self._torch_state is not None and not self._is_seeded("torch"):
            sys.modules["torch"].default_generator.seed()
        for generator in ("random", "numpy.random"):
            module: Any = sys.modules.get(generator)
            if module is not None and generator not in self._seeded:
                module.seed()
