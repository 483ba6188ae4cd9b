# SPDX-License-Identifier: Apache-2.0
"""What the two runners share.

Both use the run of `training/train.py`: data check, loader, step, files, checksums and resume, saving and signals, log,
evaluation, folder, lock and seed are implemented and tested once. detectron2's runner differs in one class, `d2.run.Trainer`,
which has its own tests (`test_detectron2.py`, `test_detectron2_faults.py`, `test_interruption.py`, `test_processes.py`,
`test_faults.py`):

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
