# SPDX-License-Identifier: Apache-2.0
"""Memory is written past its end by the weight's gradient of a strided 1x1 convolution, on CPUs with AVX2 and no AVX-512.

Needs torch alone. Run as::

    ONEDNN_MAX_CPU_ISA=AVX2 python strided_1x1.py 4

or without the variable where a processor has AVX2 only. It ends by SIGSEGV, by an abort of the C library ("double free or
corruption", "corrupted size vs. prev_size") or stands still for ever on a lock of malloc, mostly within the first 200 rounds.

What it takes, found with every block of memory ending at a page that may not be touched, over 3,720 convolutions (kernels 1, 3,
5 and 7, strides 1 to 3, dilations 1 and 2, 1 to 66 input and 1 to 100 output channels, depthwise ones, both layouts):

- kernel 1x1, stride 2, channels last, float32, fewer than 8 input channels, whatever the output's: 123 of 123 such cases with a
  buffer that ends where it can be seen (the gradient's bytes a multiple of 64); no other case;
- the gradient by the weight; the output and the gradient by the input are right and stay inside;
- ``ONEDNN_MAX_CPU_ISA=AVX2``; with AVX, SSE41, AVX512_CORE and without a limit on a processor that has AVX-512, no case;
- torch 2.9.0 (oneDNN 3.7.1) and torch 2.14.1 (oneDNN 3.12.0) alike; ``torch.backends.mkldnn.enabled = False`` ends it.

Eight floats are a register of AVX2: most likely its kernel (``jit_avx2_1x1_conv``, whose input the stride has packed first)
stores a whole register where a row of the gradient is shorter.
"""

import sys

import torch


def main(channels: int) -> None:
    """Run the convolution and its backward pass many times; a heap that is spoilt is noticed at some later allocation."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for _ in range(200):
        convolution = torch.nn.Conv2d(channels, 2 * channels, kernel_size=1, stride=2, bias=False)
        images = torch.randn(2, channels, 24, 20).to(memory_format=torch.channels_last)
        convolution(images).sum().backward()
    print(f"torch {torch.__version__}: 200 rounds of {channels} channels without a crash")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 4)
