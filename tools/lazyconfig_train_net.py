#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Train and evaluate a LazyConfig, or one made of a YAML file, with the options of detectron2's script of this name."""

from detectron2.engine import default_argument_parser, launch

from cpvt_det.cli import report_errors
from cpvt_det.d2.lazy import run


@report_errors
def main() -> None:
    """Parse the command line and start ``--num-gpus`` processes."""
    args = default_argument_parser(epilog=None).parse_args()
    launch(run, args.num_gpus, args.num_machines, args.machine_rank, args.dist_url, args=(args,))


if __name__ == "__main__":
    main()
