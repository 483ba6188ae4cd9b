# SPDX-License-Identifier: Apache-2.0
"""A page in the browser to look at the detections of trained models; the standard library is its server."""
