# SPDX-License-Identifier: Apache-2.0
"""Programs that run without this package: a trained detector as a file, whose outputs are compared with the detector's."""
