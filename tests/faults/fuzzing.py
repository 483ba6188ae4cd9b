# SPDX-License-Identifier: Apache-2.0
"""Fuzzing.

`tests/test_fuzz.py` changes COCO JSON, YAML configs, words of the command line and checkpoints in all four formats at random, by
content and by bytes. Every input has to work, or to end in an error of ours; what is accepted of COCO JSON has to score 100 with
its ground truth as detections, and what is read leaves no file behind. The suite tries 100 inputs a test, the same each time;
`CPVT_FUZZ_EXAMPLES=1500 pytest tests/test_fuzz.py` tries more.
"""

CASES = []
