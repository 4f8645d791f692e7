"""What the tests that compile kernels share: a kernel for sm_90a on a machine that needs no GPU, and its machine code, read."""

from __future__ import annotations

import pathlib
import re
import subprocess

import triton
from triton.backends.compiler import GPUTarget

from flamia.hopper.launch import OPTIONS

CUOBJDUMP = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
SHARED = 227 * 1024  # bytes of shared memory that a Hopper block can have


def pointers(names: str, kind: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), kind)


def compiled(fn, types: dict[str, str], constants: dict, source, tmp_path, num_warps: int = 4, **options) -> str:
    """The SASS of a kernel."""
    signature = {}
    for name in fn.arg_names:
        signature[name] = "constexpr" if name in constants else types.get(name, "i32")
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(fn.arg_names)
        if signature[name].startswith("*") or name.endswith(("_pad", "stride_t"))
    }
    kernel = triton.compile(source(fn, signature, constants, aligned), target=GPUTarget("cuda", 90, 32),
                            options={**OPTIONS, "num_warps": num_warps, **options})  # fmt: skip
    assert kernel.metadata.shared <= SHARED, (fn.__name__, kernel.metadata.shared)
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    return subprocess.run([str(CUOBJDUMP), "-sass", str(cubin)], capture_output=True, text=True, check=True).stdout


def instructions(sass: str) -> list[tuple[int, str]]:
    found = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", sass, re.M)
    return [(int(address, 16), text) for address, text in found]


def nothing_unpacked_from_nowhere(sass: str) -> None:
    """Where a kernel packs E4M3 numbers and unpacks the same ones, an assembler has been seen to unpack half of them from R1,
    the stack pointer."""
    assert not re.search(r"UNPACK_B\S* R\d+, R1\b", sass)


def product_loops(sass: str) -> list[list[str]]:
    """The innermost loops that hold tensor-core instructions."""
    code = instructions(sass)
    index = {address: i for i, (address, _) in enumerate(code)}
    loops = []
    for i, (address, text) in enumerate(code):
        jump = re.match(r"@!?U?P\d+\s+BRA\b.*?0x([0-9a-f]+)", text)  # plain jumps back leave a barrier's retry
        target = int(jump[1], 16) if jump else address + 1
        if target <= address and target in index:
            loops.append((index[target], i))
    bodies = {(a, b): [text for _, text in code[a : b + 1]] for a, b in loops}
    busy = [span for span, body in bodies.items() if any("GMMA" in text for text in body)]
    inner = [s for s in busy if not any(o != s and s[0] <= o[0] and o[1] <= s[1] for o in busy)]
    return [bodies[s] for s in inner]


def resources(tmp_path) -> dict[str, int]:
    """What ptxas says a kernel takes: registers of a thread, bytes of the stack."""
    said = subprocess.run(
        [str(CUOBJDUMP), "-res-usage", str(tmp_path / "kernel.cubin")], capture_output=True, text=True, check=True
    ).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", said)}
