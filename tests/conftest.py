"""What all tests share."""

from __future__ import annotations

import signal

from hypothesis import settings

# No deadline for an example: on a loaded machine a healthy one takes seconds now and then. pytest-timeout
# bounds the test.
settings.register_profile("megatron_ft", deadline=None)
settings.register_profile("fuzz", deadline=None, max_examples=4000)  # `make fuzz`
settings.load_profile("megatron_ft")

# A shell ignores these for a command that it starts with "&", and all that the tests start would inherit it.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _handler)
