# SPDX-License-Identifier: Apache-2.0
"""A program: compiles the Triton kernels for NVIDIA GPUs that need not be there, and prints what came out as a JSON object.

Kernel and target -> counts of instructions in the PTX, and, where Triton brings cuobjdump, bytes of stack (spilled registers).
Channels, heads and points are those of the published model; two levels, because levels only repeat the same code.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from cpvt_det.ops import deformable_triton as kernels

LEVELS, POINTS = 2, 4
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
# kernel -> channels per thread, warps, arguments that are None
KERNELS = {
    "forward": ("_forward_kernel", 4, 4, ()),
    "backward": ("_backward_kernel", 4, 2, ("keys_ptr",)),
    "deterministic_backward": ("_backward_kernel", 4, 2, ("grad_value_ptr",)),
    "gather": ("_gather_kernel", 4, 1, ()),
}
INTEGERS = {"keys_ptr": "*i32", "order_ptr": "*i64", "starts_ptr": "*i64"}


def source(kernel: object, options: dict, absent: tuple[str, ...]) -> ASTSource:
    """What a launch with float32 tensors would compile."""
    signature, constants = {}, {}
    for name, constexpr in ((x.name, x.is_constexpr) for x in kernel.params):
        if constexpr or name in absent:
            signature[name], constants[name] = "constexpr", options.get(name)
        elif name.endswith("_ptr"):
            signature[name] = INTEGERS.get(name, "*fp32")
        else:
            signature[name] = {"sizes": ("fp32",) * (2 * LEVELS), "height": "fp32", "width": "fp32"}.get(name, "i32")
    pointers = [i for i, name in enumerate(signature) if name.endswith("_ptr") and name not in absent]
    return ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in pointers})


def compile_kernel(name: str, capability: int) -> dict[str, int]:
    attribute, per_thread, warps, absent = KERNELS[name]
    options = kernels._options(torch.empty(1, 1, 8, 32), per_thread, warps)
    launch = {x: options.pop(x) for x in ("num_warps", "enable_fp_fusion")}
    options |= {"L": LEVELS, "P": POINTS, "BLOCK_S": LEVELS * POINTS, "POINTS": LEVELS * POINTS, "BLOCK_E": kernels.ENTRY_BLOCK}
    code = source(getattr(kernels, attribute), options, absent)
    compiled = triton.compile(code, target=GPUTarget("cuda", capability, 32), options=launch)
    ptx = compiled.asm["ptx"]
    found = {
        "reads_of_16_bytes": len(re.findall(r"ld\.global\S*\.v4\.b32", ptx)),
        "float_atomics": len(re.findall(r"(?:red|atom)\.\S*add\S*f32", ptx)),
        "barriers": len(re.findall(r"\bbar(?:rier)?\.\S*sync", ptx)),
    }
    if CUOBJDUMP.exists():
        found["stack_bytes"] = stack_bytes(compiled.asm["cubin"])
    return found


def stack_bytes(cubin: bytes) -> int:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True)
    return max(int(x) for x in re.findall(r"STACK:(\d+)", usage.stdout + usage.stderr))


if __name__ == "__main__":
    results = {f"{name}_sm{capability}": compile_kernel(name, capability) for name in KERNELS for capability in (80, 90)}
    json.dump(results, sys.stdout)
