"""Two training calls of 1x16384, for a profiler to look at the second."""

import torch

from flamia import hopper
from flamia.packing import Documents
from flamia.recipe import Recipe

recipe, scale = Recipe.strict("mxfp8_scores"), 128**-0.5
torch.manual_seed(0)
q, k, v, do = (torch.randn(16384, 16, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4))
cu = torch.tensor([0, 16384], dtype=torch.int32).cuda()
documents = Documents(cu, cu, None, 0)
for _ in range(2):
    o, lse, residual, saved = hopper.forward_saving(q, k, v, documents, recipe, scale)
    hopper.backward(do, None, q, k, None, o, lse, residual, documents, recipe, scale, saved=saved)
torch.cuda.synchronize()
