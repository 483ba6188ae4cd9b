# SPDX-License-Identifier: Apache-2.0
"""The loops of training and evaluation, without detectron2, and the tasks that they run."""
