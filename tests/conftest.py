"""One torch thread per test process: the suite runs one process per core."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("flamia", deadline=None, max_examples=15, derandomize=True)
settings.load_profile("flamia")
