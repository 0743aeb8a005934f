"""Seeds its generators before it knows its rank, as many do; the numbers are the same in each rank."""

import os
import random
import sys

import numpy
import torch

random.seed(1)
numpy.random.seed(2)
torch.manual_seed(3)
print(random.random(), numpy.random.rand(), torch.rand(1).item())
rank = int(os.environ["RANK"])
print(
    random.random(),
    numpy.random.rand(),
    torch.rand(1).item(),
    random.randint(0, 9),
    torch.nn.init.uniform_(torch.ones(1)),
)
sys.exit(3)
