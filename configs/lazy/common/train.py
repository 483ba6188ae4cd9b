# SPDX-License-Identifier: Apache-2.0
"""What detectron2's ``lazyconfig_train_net.py`` reads beside model, data and optimiser."""

import torch

cuda = torch.cuda.is_available()

# 50 epochs x 118,287 images / 32 images per iteration = 184,823 iterations; evaluation every 5 epochs.
train = dict(
    output_dir="./output",
    init_checkpoint="",
    seed=-1,
    max_iter=184823,
    amp=dict(enabled=False),
    ddp=dict(broadcast_buffers=False) if cuda else dict(broadcast_buffers=False, device_ids=None),
    checkpointer=dict(period=5000, max_to_keep=10),
    eval_period=18483,
    log_period=20,
    device="cuda" if cuda else "cpu",
)
