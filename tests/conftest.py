"""What all tests share."""

from __future__ import annotations

from hypothesis import settings

from tests.support.background import heed_the_terminal

# No deadline for an example: on a loaded machine a healthy one takes seconds now and then. pytest-timeout
# bounds the test.
settings.register_profile("megatron_ft", deadline=None)
settings.register_profile("fuzz", deadline=None, max_examples=4000)  # `make fuzz`
settings.load_profile("megatron_ft")

heed_the_terminal()
