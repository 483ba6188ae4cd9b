# SPDX-License-Identifier: Apache-2.0
"""Fuzzing.

`tests/whole/test_fuzz.py` changes COCO JSON, YAML configs, words of the command line, checkpoints in all four formats and images
in seven at random, by content and by bytes. Every input has to work, or to end in an error of ours; what is accepted of COCO JSON
has to score 100 with its ground truth as detections, an image to be as large as its header says, and what is read leaves no file
behind. The suite tries 100 inputs per test, the same each time. `PYTHONPATH=tests python -m faults.fuzz 1000` tries more.

Such inputs, and the rows of this document, found the following faults. All of them are fixed.

- A flipped byte in a PNG ends torchvision 0.29 with a segmentation fault: PNGs are decoded by Pillow.
- A training that an image stopped waited for its data workers for ever.
- A 16-bit PGM and 32-bit integers came out white, floats black, a 16-bit TIFF where zero is white inverted, and a GIF that is
  called .png with all its frames.
- Forty lines of YAML aliases took all memory; a list as a key and 100,000 signs on the command line, lists 100,000 deep in JSON,
  numbers beyond a float and ids beyond 64 bits ended in errors that were not ours.
- A box of 1e-9 pixels was an object to evaluate on and none to train on.
- Ten bytes of `.pkl` asked for 64 GB, a small compressed `.pth` unpacked to as much as it liked, and a pickle could set
  attributes of the functions that read it.
- A checkpoint whose average of weights is no dict ended in an error that was not ours.
"""

CASES = []
