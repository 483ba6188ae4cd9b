# SPDX-License-Identifier: Apache-2.0
"""Padding and batches.

In evaluation the transformer's outputs for an image are the same alone and in any batch, whatever lies under the padding, NaN
included. With `MODEL.BACKBONE.MASK_PADDING`, our default, so are the whole detector's, ResNet included.
`tests/whole/test_padding.py` draws sizes, batches and contents, in float64 within 1e-10. Backbones of detectron2's registry
cannot do it, and are refused with the key.

`python benchmarks/mask_padding.py` prints what it changes and what it costs, here on one thread of a CPU with AVX2
([record](../benchmarks/results/mask_padding_cpu_avx2.md)): DETR-R50 with 100 queries and drawn weights, an image of 480 x 640 and
one of 640 x 427 in a batch, each compared with itself alone, in float32; then the batch timed with and without it alternately,
with the quartiles over rounds:

```text
MASK_PADDING False: logits differ by 4.1e-02 (1.6e-02 of the largest), boxes by 1.4e-03
MASK_PADDING True: logits differ by 1.9e-06 (7.4e-07 of the largest), boxes by 1.2e-07
CPU time with over without: 0.808 (0.789 to 0.823), 15 rounds
```
"""

from faults.case import Case

CASES: list[Case] = []
