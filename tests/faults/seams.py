# SPDX-License-Identifier: Apache-2.0
"""What the two runners share.

Implemented once and tested once: the check of the data (`data/validation/check.py`), loader and mapper (`data/`), the step with its
guard against what is not finite, clipping, accumulation, autocast and EMA (`solver/step.py`, `solver/bad_steps.py`), files,
checksums and resume (`checkpoint/`), what happens between two steps, with saving and signals (`runner/guard.py`,
`runner/signals.py`), evaluation (`runner/evaluate.py`), folder, lock, log and seed (`runner/setup.py`), and the processes
(`runner/launch.py`).

The detectron2 runner uses them at these places, and is tested there (`test_detectron2.py`, `test_detectron2_faults.py`,
`test_interruption.py`, `test_processes.py`, `test_faults.py`):

| seam | in `cpvt_det/d2/` | what goes through it |
|:--|:--|:--|
| config | `config.load_cfg` | our keys and safe YAML in detectron2's config |
| data | `run.run`, `data.find_registered` | names that only detectron2's catalog has |
| loader | `trainer.Trainer.resume_or_load` | our loader, set to the first iteration |
| step | `trainer.StepTrainer.run_step` | our step; its scalars go to detectron2's storage, those of skipped steps do not |
| save, signals | `trainer.Trainer.build_hooks` | a hook calls `RunGuard.after_step` in every process |
| resume | `trainer.Trainer.resume_or_load` | our checkpointer; detectron2's trainer is a node of the checkpoint |
| evaluation | `trainer.Trainer` | the evaluation of the built-in runner, of detectron2's model |
"""

from faults.case import Case

CASES: list[Case] = []
