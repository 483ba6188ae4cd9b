# SPDX-License-Identifier: Apache-2.0
"""Speed and memory, side by side with the public implementations; README.md says how to run and how to read it."""
