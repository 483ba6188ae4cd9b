# SPDX-License-Identifier: Apache-2.0
"""``cpvt-det serve``: show trained models on a page in the browser; the work is done in ``predict/server.py``."""

import click

from cpvt_det.builders.trained import load_trained
from cpvt_det.cli import common_options
from cpvt_det.common.errors import BadInputError
from cpvt_det.predict import Predictor
from cpvt_det.predict.served_model import ServedModel
from cpvt_det.predict.server import MEGABYTE, PageServer

MOST = 2


@click.command()
@click.argument("weights", metavar="WEIGHTS [WEIGHTS]", nargs=-1, required=True)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on; with any other than the default, other machines can connect.",
)
@click.option("--port", default=8765, show_default=True, help="Port to listen on; 0 picks a free one.")
@click.option(
    "--allow-host",
    "names",
    multiple=True,
    metavar="NAME",
    help="Host name under which browsers request the page, such as that of a proxy; may be given several times. Not needed for IP "
    "addresses.",
)
@click.option("--max-upload", type=click.IntRange(1, 1000), default=20, show_default=True, metavar="MB", help="Largest image file.")
@click.option("--device", help="cpu, cuda, cuda:1.  [default: a GPU if there is one]")
@click.option("--config-file", default="", metavar="FILE", help="Config to use instead of the one in WEIGHTS, or if it has none.")
@common_options
def serve(
    weights: tuple[str, ...], host: str, port: int, names: tuple[str, ...], max_upload: int, device: str | None, config_file: str
) -> None:
    """Look at detections in the browser, of two models side by side. WEIGHTS is a checkpoint, a model folder or a name (cpvt-det
    weights lists them).

    Drop photographs or a folder on the page. Threshold and classes are set on the page. A click on a box shows where the decoder
    looked to find the object. Images are never cut into tiles (TEST.TILES). They stay on this machine, and nothing is written.

    \b
    Example:
      cpvt-det serve output/model_best.pth
      cpvt-det serve dino_r50
      cpvt-det serve output/peg/model_best.pth output/sine/model_best.pth --port 0
    """
    if len(weights) > MOST:
        raise BadInputError(f"at most {MOST} models are shown side by side, got {len(weights)}")
    with PageServer(host, port, max_upload * MEGABYTE, names) as server:  # before the models: its port may be in use
        models = [ServedModel(Predictor.from_trained(load_trained(path, device, config_file)), path) for path in weights]
        server.show(models)
        click.echo(f"{', '.join(model.name for model in models)}: {server.url} (stop with Ctrl+C)")
        if not server.is_local:
            click.echo(f"Anyone who can reach {host} can use this page, because it asks for no password", err=True)
        server.serve_forever()
