# SPDX-License-Identifier: Apache-2.0
"""Whether a program is being exported."""

import torch


@torch.compiler.assume_constant_result
def is_exporting() -> bool:
    """``torch.compiler.is_exporting()``, which torch 2.9 compiles to True in every program."""
    return torch.compiler.is_exporting()
