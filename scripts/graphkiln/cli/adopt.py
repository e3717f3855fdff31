"""`graphkiln adopt`: golden samples from a reference for a version that another tool wrote."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graphkiln.cli.console import command_line, print_json, print_table
from graphkiln.cli.convert import RecipeCommand, parse_options
from graphkiln.cli.options import COMPUTE_LIMIT_S, AsJson, ComputeLimit, version_folder
from graphkiln_backend.engines.compute_limit import limit_computing
from graphkiln_backend.graph.decoding import encode
from graphkiln_backend.graph.errors import RepositoryError

if TYPE_CHECKING:
    from graphkiln_backend.graph.manifest import Manifest

_UNPROVEN = "none yet: the graph is not run here, serve proves it before it answers"
_RECORDED = "recorded, not proven: no reference says that these outputs are right, but later ones must be the same"


class AdoptCommand(RecipeCommand):
    """Command with the options of a recipe that apply to a reference."""

    fields = (
        "samples", "precision", "labels", "preprocess", "weights", "pretrained", "shape", "allow_code",
    )  # fmt: skip


def adopt(
    ctx: typer.Context,
    path: Annotated[str, typer.Argument(help="STORE/NAME (newest version), or STORE/NAME/VERSION.")],
    reference: Annotated[
        str,
        typer.Option(
            help="Any source of `graphkiln convert`, such as FILE.onnx or torchvision:ARCH; or an .npz of inputs and "
            "outputs by name, or as INPUT_<i> and OUTPUT_<i>.",
            show_default="only for OpenVINO IR: record the graph's own outputs",
        ),
    ] = "",
    as_json: AsJson = False,
    compute_limit: ComputeLimit = COMPUTE_LIMIT_S,
) -> None:
    """Add golden samples to a version that another tool wrote.

    The graph is not changed: TensorRT plans, TorchScript, OpenVINO IR, ONNX, Python models. A graph that graphkiln
    serves is replayed here as `serve` would run it; any other backend gets the samples before it answers users.
    --precision is the one that the graph is meant to compute in.
    """
    from graphkiln.cli.lower import replay_as_served
    from graphkiln_backend.storage.address import parse_store
    from graphkiln_converters.adopt import adopt as run
    from graphkiln_converters.recipe_file import read_recipe

    if not isinstance(parse_store(path), Path):
        raise RepositoryError(f"{path} is not on this machine", hint="adopt the version here, then upload it")
    version = version_folder(Path(path)).absolute()
    options = {**parse_options(ctx.obj), "source": reference, "name": "adopted"}  # a recipe has a name
    with limit_computing(compute_limit):
        manifest = run(version, read_recipe(None, options, []), command=command_line(), replay=replay_as_served)
    if as_json:
        print_json(encode(manifest))
    else:
        print_table((), [*_facts(manifest), ("written", str(version))])


def _facts(manifest: Manifest) -> Iterator[tuple[str, str]]:
    adoption, golden = manifest.adoption, manifest.golden
    yield "graph", manifest.graph_file
    yield "inputs", "\n".join(map(str, manifest.signature.inputs))
    yield "outputs", "\n".join(map(str, manifest.signature.outputs))
    if adoption and golden:
        samples = "one sample" if golden.samples == 1 else f"{golden.samples} samples"
        yield "reference", f"{adoption.reference}: {samples}, meant to be in {adoption.precision}"
        verdicts = [verification.verdict for verification in manifest.verification]
        yield "proof", _RECORDED if adoption.recorded else "\n".join(verdicts) or _UNPROVEN
