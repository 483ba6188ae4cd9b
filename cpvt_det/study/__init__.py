# SPDX-License-Identifier: Apache-2.0
"""Many runs of one plan, and what they say together: ``cpvt-det study``."""
