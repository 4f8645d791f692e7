"""Training studies: what a leak, and what a rounding at odds with itself, does to a model's loss.

A kernel can be compared with exact attention on any input; whether its difference matters shows only where a model is
trained through it. Two studies train small models on real text, all from the same weights on the same bytes in the same
order, and judge each finished model through the attention it was trained with and through exact attention:

leak     one model for each recipe, those that see the future and those that do not (`plan.LEAK`)
faults   one thing wrong in each, beside a control that differs in that alone (`plan.FAULTS`)

    python -m flamia.study.run --out out/study --seconds 200

Recipes without kernels run through the reference, in float64; `quick.py` and `attention.py` make that fast enough for
hundreds of steps without changing a bit of it.
"""
