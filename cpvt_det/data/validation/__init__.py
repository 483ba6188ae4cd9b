# SPDX-License-Identifier: Apache-2.0
"""Checks of data before it is used, and reports of what they find."""
