# SPDX-License-Identifier: Apache-2.0
"""Memory is written past its end by the weight's gradient of a strided 1x1 convolution of few input channels, on CPUs.

Needs torch alone. Run as::

    python strided_1x1.py                               # 1 to 18, 24 and 32 channels, each in a process of its own
    ONEDNN_MAX_CPU_ISA=AVX2 python strided_1x1.py 4 8   # these, by the kernels of AVX2

It prints a line per number of channels: how the process ended, and how far its gradients are from those in float64. Where memory
is spoilt, a process ends by SIGSEGV or by an abort of the C library ("double free or corruption", "corrupted size vs.
prev_size"), stands still for ever on a lock of malloc, or comes to its end, by chance, with gradients that are right or wrong.

What it takes: kernel 1x1, a stride, no padding, one group, sides that are multiples of the stride, channels last, and fewer input
channels than a block, 8 with AVX2 and 16 with AVX-512 (1 to 15 channels crash on an Intel Xeon, from maps of 64 x 64 on; float32,
and the kernel for bfloat16 has the same line). The gradient by the weight; output and gradient by the input stay inside.

The reason, in oneDNN's ``jit_avx2_1x1_convolution.cpp``, ``jit_avx512_common_1x1_convolution.cpp`` and
``jit_avx512_core_bf16_1x1_convolution.cpp``: the cells that the stride takes are gathered first, in a workspace of
``cells * channels`` numbers (``rtus_prepare_space_info``), whose part from ``cell`` on begins at ``cell * block`` (``rp.ws``). With
fewer channels than a block that is past its end; with as many or more it never is. oneDNN 3.7.1 (torch 2.9.0), 3.12.0
(torch 2.14.1) and its main branch; https://github.com/uxlfoundation/oneDNN/issues/6035.

That agrees with what was found with AVX2 before, with every block of memory ending at a page that may not be touched, over 3,720
convolutions (kernels 1, 3, 5 and 7, strides 1 to 3, dilations 1 and 2, 1 to 66 input and 1 to 100 output channels, depthwise ones,
both layouts): the 123 with fewer than 8 input channels and a buffer that ends where it can be seen, and no other.
"""

import subprocess
import sys

import torch

CHANNELS = (*range(1, 19), 24, 32)
SIDES = ((24, 20), (64, 64), (128, 96))
ROUNDS = 40
PATIENCE = 120  # seconds


def main(numbers: list[int]) -> None:
    """Try each number of channels in a process of its own."""
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}")
    for number in numbers:
        command = [sys.executable, __file__, "--one", str(number)]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
            outcome = ended.stdout.strip() or f"ended by {ended.returncode}, {ended.stderr.strip().splitlines()[-1:]}"
        except subprocess.TimeoutExpired:
            outcome = f"stands still for {PATIENCE} s"
        print(f"{number:3} channels: {outcome}", flush=True)


def try_one(channels: int) -> None:
    """Run the convolution and its backward pass many times; a heap that is spoilt is noticed at some later allocation."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    error = 0.0
    for _ in range(ROUNDS):
        for sides in SIDES:
            convolution = torch.nn.Conv2d(channels, 2 * channels, kernel_size=1, stride=2, bias=False)
            images = torch.randn(2, channels, *sides).to(memory_format=torch.channels_last)
            convolution(images).square().sum().backward()
            cells = images[:, :, ::2, ::2].double()
            outputs = torch.einsum("oi,bihw->bohw", convolution.weight[:, :, 0, 0].detach().double(), cells)
            expected = torch.einsum("bohw,bihw->oi", 2 * outputs, cells)
            found = convolution.weight.grad[:, :, 0, 0].double()
            error = max(error, float((found - expected).abs().max() / expected.abs().max()))
    print(f"{ROUNDS * len(SIDES)} rounds without a crash, gradients differ by {error:.0e} from those in float64")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        try_one(int(sys.argv[2]))
    else:
        main([int(word) for word in sys.argv[1:]] or list(CHANNELS))
