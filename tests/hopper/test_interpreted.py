"""Kernels run by Triton's interpreter: see interpreted.py (lists of work, encoders) and interpreted_mxfp8.py."""

import pathlib
import subprocess
import sys

import pytest

triton = pytest.importorskip("triton")
if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9):
    pytest.skip("the interpreter of older Tritons stumbles over NumPy 2", allow_module_level=True)
HERE = pathlib.Path(__file__).parent


@pytest.mark.parametrize("program, count", [("interpreted.py", 7), ("interpreted_mxfp8.py", 5)])
def test_every_check_of(program, count):
    path = HERE / program
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    checks = [line[4:].split("(")[0] for line in path.read_text().splitlines() if line.startswith("def check_")]
    assert done.stdout.split() == checks and len(checks) == count
