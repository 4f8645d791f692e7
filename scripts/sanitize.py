"""compute-sanitizer over the kernels, on small shapes: `make sanitize`, on a card.

    python scripts/sanitize.py                      every tool, one after another
    python scripts/sanitize.py memcheck             one of them
    python scripts/sanitize.py --call               what they watch: one forward and backward per configuration

memcheck finds accesses outside of what was allocated (the caching allocator is off, so that a neighbour's memory is not
taken for ours), racecheck hazards in shared memory, initcheck reads of device memory that nobody wrote, synccheck barriers
that not all threads reach. A tool that cannot run here says so; it is no verdict. Exit code: 0 clean, 1 something found,
2 no tool could run.
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
MINUTES = 4


def call() -> None:
    """Packed documents of awkward lengths, with and without a window, both head sizes, a tail, and a NaN."""
    import torch

    sys.path.insert(0, str(ROOT / "tests" / "gpu"))
    from calls import draw, offsets, run

    from flamia.packing import Documents

    lengths = [130, 0, 1, 77]
    for d, window in ((128, (None, 0)), (128, (40, 0)), (64, (None, None)), (64, (9, 3))):
        given = draw(sum(lengths) + 5, sum(lengths) + 5, (2, 1), d)
        cu = offsets(lengths)
        run(*given, Documents(cu, cu, *window))
        given[1][3, 0, 0] = torch.nan
        run(*given, Documents(cu, cu, *window))
    torch.cuda.synchronize()
    print("called")


def sanitizer() -> str | None:
    places = [
        shutil.which("compute-sanitizer"),
        *map(str, sorted(pathlib.Path("/usr/local").glob("cuda*/bin/compute-sanitizer"))),
    ]
    return next((place for place in places if place and os.access(place, os.X_OK)), None)


def watched(tool: str, program: str) -> tuple[str, str]:
    """(clean, found or "could not run", the lines that say why)."""
    command = [program, "--tool", tool, "--print-limit", "20", "--error-exitcode", "9"]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": str(ROOT / "src")}
    try:
        done = subprocess.run(
            [*command, sys.executable, __file__, "--call"], env=environment, capture_output=True, text=True,
            timeout=60 * MINUTES,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "could not run", f"nothing after {MINUTES} minutes"
    output = done.stdout + done.stderr
    summary = re.findall(r"^=+ (?:ERROR|RACECHECK) SUMMARY: .*", output, re.M)
    if "called" not in done.stdout or not summary:
        return "could not run", "\n".join(output.splitlines()[-15:])
    if re.search(r"SUMMARY: (0 errors|0 hazards)", summary[-1]):
        return "clean", summary[-1]
    return "found", "\n".join(line for line in output.splitlines() if line.startswith("====="))[:6000]


def main() -> int:
    if sys.argv[1:] == ["--call"]:
        call()
        return 0
    program = sanitizer()
    if program is None:
        print("no compute-sanitizer here: it comes with the CUDA toolkit")
        return 2
    call()  # compiles outside of the tools' reach, into Triton's cache
    verdicts = []
    for tool in sys.argv[1:] or TOOLS:
        verdict, why = watched(tool, program)
        verdicts.append(verdict)
        print(f"{tool}: {verdict}\n{why}\n", flush=True)
    return 1 if "found" in verdicts else 0 if "clean" in verdicts else 2


if __name__ == "__main__":
    raise SystemExit(main())
