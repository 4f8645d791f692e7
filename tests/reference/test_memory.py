"""Memory grows with the length, not with its square."""

import subprocess
import sys

PROGRAM = """
import resource, torch
from flamia import reference
from flamia.packing import Documents
from flamia.recipe import Recipe
torch.set_num_threads(1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
docs = Documents.batched(1, 16384, 16384, None, 0)
q, k, v, do = (torch.randn(16384, 1, 128).bfloat16() for _ in range(4))
o, lse, residual = reference.forward(q, k, v, docs, Recipe.strict("mxfp8"), 128**-0.5)
reference.backward(do, None, q, k, v, o, lse, residual, docs, Recipe.strict("mxfp8"), 128**-0.5)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_sixteen_thousand_tokens_fit_in_three_gib():
    """One head of 128, forward and backward; the score matrix alone would take 2 GiB in float64."""
    peak = int(subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout)
    assert peak < 3 * 2**20  # KiB
