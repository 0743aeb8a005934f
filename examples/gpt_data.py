"""Synthetic training data for `train_gpt.py`: a sample is a function of (seed, sample index) and nothing else.

No file, no worker process and no global random state, so the position in the data is one integer, the number of
consumed samples, and a resumed run sees the very samples that an undisturbed run sees.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch

# Each token has one usual successor; this share of the tokens is drawn at random instead, so that a model that
# has learned the task ends at a loss of about 0.1 * ln(vocabulary) + 0.33, not at 0.
_NOISE = 0.1
# Validation samples lie so far behind the training samples that no run ever trains on them.
_FIRST_VALIDATION_SAMPLE = 2**40


class SyntheticTokens:
    """Sequences in which most tokens are followed by their usual successor, a permutation of the vocabulary."""

    def __init__(self, *, vocab_size: int, seq_length: int, seed: int) -> None:
        self.vocab_size = vocab_size
        self.seq_length = seq_length
        self.seed = seed
        self._successor = list(range(vocab_size))
        random.Random(f"successor {seed}").shuffle(self._successor)

    def sample(self, index: int) -> list[int]:
        """The tokens of one sample: `seq_length + 1` of them, inputs and labels overlap by all but one."""
        draw = random.Random(f"sample {self.seed} {index}").random
        token = int(draw() * self.vocab_size)
        tokens = [token]
        for _ in range(self.seq_length):
            if draw() < _NOISE:
                token = int(draw() * self.vocab_size)
            else:
                token = self._successor[token]
            tokens.append(token)
        return tokens


def training_samples(
    data: SyntheticTokens, *, consumed_samples: int, micro_batch_size: int, dp_rank: int, dp_size: int
) -> Iterator[torch.Tensor]:
    """Micro-batches of this data-parallel rank from a position on, each [micro_batch_size, seq_length + 1].

    The order is that of Megatron's pretraining sampler: a micro-batch of all ranks together is a run of
    consecutive samples. Ranks of one tensor-parallel group draw the same samples: nothing has to be broadcast.
    """
    position = consumed_samples + dp_rank * micro_batch_size
    while True:
        rows = [data.sample(index) for index in range(position, position + micro_batch_size)]
        yield torch.tensor(rows, dtype=torch.int64)
        position += micro_batch_size * dp_size


def validation_samples(
    data: SyntheticTokens, *, micro_batch_size: int, dp_rank: int, dp_size: int
) -> Iterator[torch.Tensor]:
    """Micro-batches for an evaluation; every evaluation sees the same samples."""
    return training_samples(
        data,
        consumed_samples=_FIRST_VALIDATION_SAMPLE,
        micro_batch_size=micro_batch_size,
        dp_rank=dp_rank,
        dp_size=dp_size,
    )
