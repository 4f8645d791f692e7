"""Cycles of overlap.cubin's pieces alone and side by side (gen.py says how to make it). Needs torch and a Hopper GPU."""

import ctypes
import pathlib

import torch

PRODUCTS = {1: "bf16 SS", 2: "bf16 RS", 3: "fp8 SS", 4: "fp8 RS"}
ARITHMETIC = {10: "ffma", 11: "ex2", 12: "mul ffma ex2 add", 13: "ffma of 3 registers", 14: "fmul", 15: "fadd imm", 16: "iadd",
              17: "fmnmx", 20: "xor", 18: "ex2 + 5 fma", 19: "ex2 + 7 fma"}  # fmt: skip
SHARED = 196608

driver = ctypes.CDLL("libcuda.so.1")
out = torch.zeros(2, dtype=torch.int64, device="cuda")
sink = torch.zeros(1024, device="cuda")


def check(result: int, what: str) -> None:
    if result:
        raise SystemExit(f"{what}: CUDA error {result}")


module, function = ctypes.c_void_p(), ctypes.c_void_p()
check(
    driver.cuModuleLoadData(ctypes.byref(module), pathlib.Path(__file__).with_name("overlap.cubin").read_bytes()),
    "load",
)
check(driver.cuModuleGetFunction(ctypes.byref(function), module, b"overlap"), "function")
check(driver.cuFuncSetAttribute(function, 8, SHARED), "shared memory")


def cycles(kinds: tuple[int, int], repeats: tuple[int, int]) -> list[int]:
    """Of the two warpgroups of the first block, on every multiprocessor at once."""
    numbers = [ctypes.c_int(x) for x in (*kinds, *repeats)]
    pointers = [ctypes.c_void_p(x.data_ptr()) for x in (out, sink)]
    arguments = [*numbers, *pointers, ctypes.c_float(1.0001), ctypes.c_float(1e-7)]
    array = (ctypes.c_void_p * len(arguments))(*[ctypes.cast(ctypes.pointer(x), ctypes.c_void_p) for x in arguments])
    check(driver.cuLaunchKernel(function, 132, 1, 1, 256, 1, 1, SHARED, None, array, None), "launch")
    torch.cuda.synchronize()
    return out.tolist()


cycles((1, 1), (200, 200))
print("alone: cycles of eight wgmma, or of 128 operations a thread")
alone = {kind: cycles((kind, 0), (2000, 1))[0] / 2000 for kind in PRODUCTS | ARITHMETIC}
for kind, name in (PRODUCTS | ARITHMETIC).items():
    print(f"{name:20s} {alone[kind]:8.1f}")
print("side by side, each while the other lasts: how many times as long")
for product in PRODUCTS:
    for kind in ARITHMETIC:
        repeats = int(2000 * alone[product] / alone[kind])
        arithmetic = cycles((product, kind), (6000, repeats))[1] / repeats / alone[kind]
        products = cycles((product, kind), (2000, 3 * repeats))[0] / 2000 / alone[product]
        print(
            f"{PRODUCTS[product]:8s} + {ARITHMETIC[kind]:20s} arithmetic x{arithmetic:.2f}   products x{products:.2f}"
        )
