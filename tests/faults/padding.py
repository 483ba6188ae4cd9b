# SPDX-License-Identifier: Apache-2.0
"""Padding and batches.

With `MODEL.BACKBONE.MASK_PADDING`, our default, an image has the same outputs alone and in any batch, whatever the padding
contains, even NaN (`tests/whole/test_padding.py`, in float64 within 1e-10). `python benchmarks/mask_padding.py` compares
DETR-R50's outputs alone and in a padded batch, with and without masking, and times both
([record](../benchmarks/results/mask_padding_cpu_avx2.md)):

```text
MASK_PADDING False: logits differ by 4.1e-02 (1.6e-02 of the largest), boxes by 1.4e-03
MASK_PADDING True: logits differ by 1.9e-06 (7.4e-07 of the largest), boxes by 1.2e-07
CPU time with over without: 0.808 (0.789 to 0.823), 15 rounds
```
"""

from faults.case import Case

CASES: list[Case] = []
