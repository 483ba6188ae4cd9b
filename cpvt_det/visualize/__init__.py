# SPDX-License-Identifier: Apache-2.0
"""Pictures and tables of what a detector does: where it looks, what an encoding adds, what its input is, what it costs."""
