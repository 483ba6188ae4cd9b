# SPDX-License-Identifier: Apache-2.0
"""Bad days, one module for each area: what goes in, the exit code and the message that come out.

A module with a list ``CASES`` is a section of ``docs/reliability.md``. Its docstring opens it, a title on the first line, then text
in Markdown; the list, which may be empty, is the table, and ``tests/whole/test_faults.py`` runs every row. The document is made
by::

    PYTHONPATH=tests python -m faults.report
"""
