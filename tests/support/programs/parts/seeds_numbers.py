import random

import numpy as np

random.seed(7)
np.random.seed(7)
FIRST = random.random(), np.random.rand()
