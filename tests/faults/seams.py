# SPDX-License-Identifier: Apache-2.0
"""What the two runners share.

Both take the run of `training/train.py`: the check of the data, loader, step, files, checksums and resume, saving and signals, log,
evaluation, folder, lock and seed are implemented once and tested once. Where detectron2's runner differs is one class,
`d2.run.Trainer`, and is tested there (`test_detectron2.py`, `test_detectron2_faults.py`, `test_interruption.py`,
`test_processes.py`, `test_faults.py`):

| method | what it does |
|:--|:--|
| `prepare` | registers `DATASETS.REGISTER` in detectron2's catalogs, and finds names that only these have |
| `start` | writes detectron2's log into `log.txt` too |
| `build_detector` | detectron2's `build_model` |
| `saved` | leaves detectron2's unchanged keys out of `config.yaml` and the checkpoints |
| `take_steps` | detectron2's loop around our step, with its hooks; scalars of log lines go to its storage |
"""

from faults.case import Case

CASES: list[Case] = []
