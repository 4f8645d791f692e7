"""One torch thread per test process: the suite runs one process per core."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.set_num_threads(1)
try:
    from hypothesis import settings
except ModuleNotFoundError:  # tests/gpu runs where nothing but pytest is installed
    pass
else:
    settings.register_profile("flamia", deadline=None, max_examples=15, derandomize=True)
    settings.load_profile("flamia")
