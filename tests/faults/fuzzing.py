# SPDX-License-Identifier: Apache-2.0
"""Fuzzing.

`tests/whole/test_fuzz.py` changes COCO JSON, YAML configs, words of the command line, checkpoints and images at random. Every
input must work or end in one of our errors. COCO JSON that is accepted must score 100 with its own ground truth. The suite
tries 100 inputs per test; `PYTHONPATH=tests python -m faults.fuzz 1000` tries more.
"""

CASES = []
