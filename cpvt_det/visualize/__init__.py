# SPDX-License-Identifier: Apache-2.0
"""Pictures and tables of what a detector does: where it looks, what an encoding adds, what it is fed, what it costs."""
