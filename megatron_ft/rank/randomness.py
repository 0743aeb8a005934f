"""Random numbers in a script that is run ahead: what it seeds stays, what nobody seeds differs from rank to rank."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

__all__ = ["Randomness"]

_TORCH = (
    *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"),
    *("normal", "bernoulli", "multinomial", "poisson", "seed", "initial_seed", "get_rng_state"),
)
_STATES = ("seed", "initial_seed", "get_rng_state")
"""Of ``torch.random``, whose other functions call them there."""
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
        self._modules: dict[str, Any] = {}
        self._states: dict[str, Any] = {}
        """Of the generators that nobody has seeded: what they were when they were made."""
        self._made: dict[int, weakref.ref[Any]] = {}
        """Generators that libraries have made for themselves, and haven't seeded."""

    def hooks(self) -> dict[str, Callable[[Any, Callable[..., None]], None]]:
        """By module, what to do with it when it has been imported; the second argument replaces a function."""
        return {"random": self._python, "numpy.random": self._numpy, "torch": self._torch}

    def _python(self, module: Any, replace: Callable[..., None]) -> None:
        if not hasattr(module, "_inst"):
            return  # the script's own module of that name
        self._modules["random"], self._states["random"] = module, module.getstate()
        replace(module.Random, "seed", self._before_seed)
        replace(module.Random, "setstate", lambda generator, *_: self._made.pop(id(generator), None))
        for name, function in list(vars(module).items()):
            if getattr(function, "__self__", None) is module._inst:
                replace(module, name, self._before("random", name))

    def _numpy(self, module: Any, replace: Callable[..., None]) -> None:
        generator = module.mtrand._rand
        self._modules["numpy.random"], self._states["numpy.random"] = module, repr(module.get_state())
        for name, function in list(vars(module).items()):
            if getattr(function, "__self__", None) is generator or name in ("seed", "ranf", "sample"):
                replace(module, name, self._before("numpy.random", name))

    def _torch(self, module: Any, replace: Callable[..., None]) -> None:
        self._torch_state = module.default_generator.initial_seed(), module.default_generator.get_state()
        for owner, names in ((module, _TORCH), (module.random, _STATES), (module.Tensor, _TENSOR)):
            for name in names:
                if hasattr(owner, name):
                    replace(owner, name, self._before("torch", name))

    def _before(self, generator: str, name: str) -> Callable[..., None]:
        def before(*arguments: Any, **named: Any) -> None:
            if name in ("setstate", "set_state", "set_bit_generator"):
                self._seeded.add(generator)
            elif name == "seed" and generator != "torch":
                self._seed(generator, [*arguments, *named.values(), None][0])
            elif not self._is_seeded(generator) and named.get("generator") is None:
                self._draw(f"draws random numbers ({generator}.{name}) that nobody has seeded")

        return before

    def _seed(self, generator: str, seed: Any) -> None:
        if seed is not None:
            self._seeded.add(generator)
        else:  # by the system, as it was in the beginning
            self._seeded.discard(generator)
            self._states.pop(generator, None)

    def _before_seed(self, generator: Any, a: Any = None, *_more: Any, **_named: Any) -> None:
        self._made.pop(id(generator), None)
        if a is None:
            self._draw_if_users("draws random numbers (random.Random)")
            self._made[id(generator)] = weakref.ref(generator)

    def _is_seeded(self, generator: str) -> bool:
        if generator == "torch":
            # manual_seed and fork_rng are C++'s own business: the seed tells
            return bool(sys.modules["torch"].default_generator.initial_seed() != self._torch_state[0])
        return generator in self._seeded

    def why_spoiled(self) -> str | None:
        """Whether numbers that would be the same in all ranks were drawn in a way that isn't seen: in C++, say."""
        changed = [
            name for name, state in self._states.items() if name not in self._seeded and self._now(name) != state
        ]
        if self._torch_state is not None and not self._is_seeded("torch"):
            torch: Any = sys.modules["torch"]
            if not torch.equal(torch.default_generator.get_state(), self._torch_state[1]):
                changed.append("torch")
        return f"it has drawn random numbers that nobody has seeded ({changed[0]})" if changed else None

    def _now(self, name: str) -> Any:
        module = self._modules[name]
        return module._inst.getstate() if name == "random" else repr(module.mtrand._rand.get_state())

    def freshen(self) -> None:
        """In a new rank: new seeds for those that nobody has seeded."""
        if self._torch_state is not None and not self._is_seeded("torch"):
            sys.modules["torch"].default_generator.seed()
        for name, module in self._modules.items():
            if name not in self._seeded:
                module.seed()
        for reference in self._made.values():
            generator = reference()
            if generator is not None:
                generator.seed()
