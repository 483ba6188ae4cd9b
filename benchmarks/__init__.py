# SPDX-License-Identifier: Apache-2.0
"""Speed and memory of our implementations and of public ones; README.md explains how to run it and how to read the results."""
