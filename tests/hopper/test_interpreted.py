"""The lists of work and the encoders, run by Triton's interpreter: see interpreted.py."""

import pathlib
import subprocess
import sys

import pytest

triton = pytest.importorskip("triton")
if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9):
    pytest.skip("the interpreter of older Tritons stumbles over NumPy 2", allow_module_level=True)
PROGRAM = pathlib.Path(__file__).with_name("interpreted.py")


def test_lists_and_encoders():
    done = subprocess.run([sys.executable, str(PROGRAM)], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    checks = [line[4:].split("(")[0] for line in PROGRAM.read_text().splitlines() if line.startswith("def check_")]
    assert done.stdout.split() == checks and len(checks) == 7
