"""Kernels are compiled before the first test, in as many processes as there are configurations: one after another, as the
tests would come to them, it takes most of a run. What is slow to import is imported meanwhile. Also lets the tests here
import their neighbours, whichever way pytest was started."""

import contextlib
import importlib
import os
import pathlib
import subprocess
import sys
import time

import pytest

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))
WORTH_IT = 10  # tests: a few of them compile what they need themselves
SLOW_IMPORTS = ("torch._inductor.compile_fx", "transformers.models.llama.modeling_llama", "matplotlib.pyplot")


def pytest_collection_finish(session):
    here = [item for item in session.items if HERE in pathlib.Path(item.path).parents]
    if len(here) < WORTH_IT or session.config.option.collectonly:
        return
    import warm

    started = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    jobs = [
        subprocess.Popen([sys.executable, str(HERE / "warm.py"), *map(str, job)], env=environment)
        for job in warm.CONFIGURATIONS
    ]
    for name in SLOW_IMPORTS:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for job in jobs:  # one that fails is left to the tests, which fail for the same reason
        try:
            job.wait(timeout=max(1.0, 150 - (time.monotonic() - started)))
        except subprocess.TimeoutExpired:
            job.kill()
    print(f"\ncompiled in {time.monotonic() - started:.0f} s")


@pytest.fixture
def kernel_calls(monkeypatch):
    """One entry for each forward that the kernels run."""
    from flamia import hopper

    calls = []
    for name in ("forward", "forward_saving"):
        function = getattr(hopper, name)
        monkeypatch.setattr(hopper, name, lambda *args, run=function: calls.append(1) or run(*args))
    return calls
