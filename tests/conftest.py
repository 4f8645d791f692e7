"""One torch thread per test process: the suite runs one process per core. And the fixtures that several rooms use."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

torch.set_num_threads(1)
try:
    from hypothesis import settings
except ModuleNotFoundError:  # tests/gpu runs where nothing but pytest is installed
    pass
else:
    settings.register_profile("flamia", deadline=None, max_examples=15, derandomize=True)
    settings.load_profile("flamia")


@pytest.fixture
def forward_calls(monkeypatch):
    """One entry for each time that the reference's forward runs."""
    import flamia.reference

    calls = []
    forward = flamia.reference.forward
    monkeypatch.setattr(flamia.reference, "forward", lambda *args: calls.append(1) or forward(*args))
    return calls


@pytest.fixture
def fresh_compiler():
    """Nothing compiled before counts, and nothing compiled here stays."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
