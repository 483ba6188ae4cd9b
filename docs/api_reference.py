# SPDX-License-Identifier: Apache-2.0
"""``docs/api/``: a page for each folder of the package, of its modules' docstrings. Made at every build, not kept."""

import pkgutil
from pathlib import Path

import cpvt_det

FOLDER = Path(__file__).resolve().parent / "api"
LEFT_OUT = {"build", "cli", "d2", "__main__"}  # an old name; described by --help; importable with detectron2 only


def write() -> None:
    """Write the pages and their index."""
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.rst"):
        old.unlink()
    names = []
    for module in pkgutil.iter_modules(cpvt_det.__path__, "cpvt_det."):
        if module.name.rpartition(".")[2] not in LEFT_OUT:
            names.append(module.name)
            (FOLDER / f"{module.name}.rst").write_text(_page(module.name, module.ispkg), encoding="utf-8")
    entries = "\n".join(f"   {name}" for name in names)
    index = f"{_title('The API', '=')}\n.. toctree::\n   :maxdepth: 1\n\n{entries}\n"
    (FOLDER / "index.rst").write_text(index, encoding="utf-8")


def _page(name: str, is_folder: bool) -> str:
    modules = [name]
    if is_folder:
        folder = Path(cpvt_det.__path__[0], *name.split(".")[1:])
        modules += [
            module.name for module in pkgutil.walk_packages([str(folder)], f"{name}.") if module.name != "cpvt_det.layers.position"
        ]
    parts = [_title(f"``{name}``", "=")]
    for module in modules:
        parts += [_title(f"``{module}``", "-")] if module != name else []
        parts.append(f".. automodule:: {module}\n   :members:\n   :ignore-module-all:\n   :show-inheritance:\n")
    return "\n".join(parts)


def _title(text: str, line: str) -> str:
    return f"{text}\n{line * len(text)}\n"
