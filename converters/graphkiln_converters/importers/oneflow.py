"""Import models that OneFlow saved into a model repository.

    NAME/1/model/{model.mlir, STATE.TENSOR/{out,meta}, ...}

Heavy imports are lazy: a server checks for such folders at each start and rarely converts one.

Source: oneflow-serving, "Model Repository Structure".
"""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

_FOLDER = "model"
_GRAPH = "model.mlir"


class OneFlowImporter:
    """See `graphkiln_backend.repository.importers.Importer`."""

    kind = "oneflow"
    framework = "OneFlow"
    distributions = ("graphkiln", "onnx-ir", "onnxscript", "onnxruntime")

    def find_saved(self, version: Path) -> Path | None:
        """Find the folder of `flow.save` in a version folder, or return None."""
        saved = version / _FOLDER
        return saved if (saved / _GRAPH).is_file() else None

    def convert(self, saved: Path, target: Path) -> None:
        """Convert and prove a saved graph, as `graphkiln convert oneflow:DIR` does.

        Raises:
            ConversionError: The graph cannot be converted.
            VerificationError: The outputs changed.
        """
        from graphkiln_converters.convert import convert
        from graphkiln_converters.recipe import Recipe

        with TemporaryDirectory(prefix="graphkiln-") as temporary:
            recipe = Recipe(source=f"oneflow:{saved}", name="imported", model_store=Path(temporary), version=1)
            command = f"graphkiln convert oneflow:{saved} --name NAME"
            folder = convert(recipe, command=command)
            for file in folder.iterdir():
                shutil.move(file, target / file.name)
