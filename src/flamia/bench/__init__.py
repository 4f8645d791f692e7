"""Speed, measured against others on the same card in the same minute: `flamia bench`, or `python -m flamia.bench.run`,
which needs nothing but torch and Triton.

    workloads.py  what is timed
    peers.py      who is timed, and what a figure of theirs includes
    checks.py     whether their sums are right: nobody is timed as an equal before that
    timing.py     CUDA graphs, events, interleaved rounds, peak memory
    run.py        one report
    report.py     the report as text, JSON, CSV; plots.py as a picture, on any machine
    more.py       a second report: other workloads, share.py of quantisation, memory.py and model.py packed against padded
    parallel.py   several cards against one
"""
