# SPDX-License-Identifier: Apache-2.0
"""Bad days, one module for each area: what goes in, the exit code and the message that come out.

A module's docstring opens its section of ``docs/reliability.md``: a title on its first line, then text in Markdown. Its list
``CASES``, where it has one, is the table, and ``tests/test_faults.py`` runs every row. ``report.py`` writes the document::

    PYTHONPATH=tests python -m faults.report
"""
