# SPDX-License-Identifier: Apache-2.0
"""Other formats than COCO JSON, read into the same records."""
