"""Random numbers in a script that is run ahead: seeded generators stay, unseeded ones differ between ranks."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

from megatron_ft.rank.base.replacing import Replacements

_TORCH = (
    *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"),
    *("normal", "bernoulli", "multinomial", "poisson", "seed", "initial_seed", "get_rng_state"),
)
_STATES = ("seed", "initial_seed", "get_rng_state")
"""Functions of ``torch.random`` to replace; its other functions call these."""
_TENSOR = (
    *("uniform_", "normal_", "random_", "bernoulli_", "exponential_", "geometric_", "cauchy_", "log_normal_"),
    *("bernoulli", "multinomial"),
)
_SETTERS = ("setstate", "set_state", "set_bit_generator")


class Randomness:
    """Generators that Python, numpy and torch share within a process."""

    def __init__(
        self, replacements: Replacements, draw: Callable[[str], None], draw_if_users: Callable[[str], None]
    ) -> None:
        """``draw`` is called before the first number is drawn from a generator that the script hasn't seeded.

        ``draw_if_users``: called before a generator is seeded by the system, which a library may do for itself.
        """
        self._replace = replacements.replace
        self._draw = draw
        self._draw_if_users = draw_if_users
        self._ways: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {}
        """Functions per generator that return its state and that seed it from the system."""
        self._states: dict[str, Any] = {}
        """First states of the generators that the script hasn't seeded."""
        self._seeded: set[str] = set()
        self._torch_seed: Any = None
        self._made: dict[int, weakref.ref[Any]] = {}
        """Generators that libraries have made for themselves and not seeded."""
        for name, hook in (("random", self._python), ("numpy.random", self._numpy), ("torch", self._torch)):
            replacements.when_imported(name, hook)

    def _python(self, module: Any) -> None:
        if not hasattr(module, "_inst"):
            return  # a module of the script with that name
        self._note("random", module.getstate, module.seed)
        self._replace(module.Random, "seed", self._before_seed)
        self._replace(module.Random, "setstate", lambda generator, *_: self._before_seed(generator, "a state"))
        for name, function in list(vars(module).items()):
            if getattr(function, "__self__", None) is module._inst:
                self._replace(module, name, self._before("random", name))

    def _numpy(self, module: Any) -> None:
        generator = module.mtrand._rand
        self._note("numpy.random", lambda: repr(module.mtrand._rand.get_state()), module.seed)
        for name, function in list(vars(module).items()):
            if getattr(function, "__self__", None) is generator or name in ("seed", "ranf", "sample"):
                self._replace(module, name, self._before("numpy.random", name))

    def _torch(self, module: Any) -> None:
        generator = module.default_generator
        self._torch_seed = generator.initial_seed()
        self._note("torch", lambda: generator.get_state().tolist(), generator.seed)
        for owner, names in ((module, _TORCH), (module.random, _STATES), (module.Tensor, _TENSOR)):
            for name in names:
                if hasattr(owner, name):
                    self._replace(owner, name, self._before("torch", name))

    def _note(self, generator: str, state: Callable[[], Any], seed: Callable[[], Any]) -> None:
        self._ways[generator], self._states[generator] = (state, seed), state()

    def _before(self, generator: str, name: str) -> Callable[..., None]:
        def before(*arguments: Any, **named: Any) -> None:
            given = [*arguments, *named.values(), None][0]
            if name in _SETTERS or (name == "seed" and given is not None):
                self._seeded.add(generator)
            elif name == "seed" and generator != "torch":  # seeded by the system, as at the start
                self._seeded.discard(generator)
                self._states.pop(generator, None)
            elif not self._is_seeded(generator) and named.get("generator") is None:
                self._draw(f"draws random numbers ({generator}.{name}) without a seed")

        return before

    def _before_seed(self, generator: Any, a: Any = None, *_more: Any, **_named: Any) -> None:
        self._made.pop(id(generator), None)
        if a is None:
            self._draw_if_users("draws random numbers (random.Random)")
            self._made[id(generator)] = weakref.ref(generator)

    def _is_seeded(self, generator: str) -> bool:
        if generator == "torch":
            # manual_seed and fork_rng happen in C++: compare seeds
            return bool(sys.modules["torch"].default_generator.initial_seed() != self._torch_seed)
        return generator in self._seeded

    def why_spoiled(self) -> str | None:
        """Return why ranks would share random numbers, drawn unseeded and unseen, as in C++; None if they wouldn't."""
        for generator, state in self._states.items():
            if not self._is_seeded(generator) and self._ways[generator][0]() != state:
                return f"the script has drawn random numbers without a seed ({generator})"
        return None

    def freshen(self) -> None:
        """Seed, in a new rank, the generators that the script hasn't seeded."""
        for generator, (_, seed) in self._ways.items():
            if not self._is_seeded(generator):
                seed()
        for reference in self._made.values():
            made = reference()
            if made is not None:
                made.seed()
