#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Runs the commands of a document, to the first that fails: ``python docs/run_commands.py docs/tutorial.md``."""

import re
import subprocess
import sys
from pathlib import Path


def commands(document: Path) -> list[str]:
    """Each command line of the fenced blocks without a language, without comments; continued lines are one."""
    text = document.read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S)
    lines = [line for language, block in blocks if not language for line in block.replace("\\\n", " ").splitlines()]
    return [command for line in lines if (command := re.sub(r"(^|\s+)#.*", "", line).strip())]


def main() -> None:
    for command in commands(Path(sys.argv[1])):
        print(f"$ {command}", flush=True)
        if subprocess.run(command, shell=True, executable="/bin/bash").returncode:
            raise SystemExit(f"failed: {command}")


if __name__ == "__main__":
    main()
