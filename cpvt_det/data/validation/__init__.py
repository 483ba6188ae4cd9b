# SPDX-License-Identifier: Apache-2.0
"""What is checked of data before it is used, and what is reported."""
