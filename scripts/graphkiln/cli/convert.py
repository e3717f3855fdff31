"""`graphkiln convert`: a trained model in, a proven version of a model repository out."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphkiln_backend.graph.errors import ConversionError

if TYPE_CHECKING:
    from graphkiln_converters.recipe import Recipe

_SOURCE = "Where the model comes from"
_EDGE = "What goes in and comes out"
_GRAPH = "How the graph is rewritten and lowered"
_PROOF = "How it is proven"


def convert(  # one flag a field of the recipe
    source: Annotated[
        str,
        typer.Argument(
            help="torchvision:ARCH, timm:ARCH, huggingface:DIR_OR_ID, oneflow:DIR, "
            "python:FILE_OR_MODULE:FACTORY, FILE.pt2 or FILE.onnx.",
            show_default=False,
        ),
    ] = "",
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Recipe keys, for example preprocess.mean=[0.5].", metavar="[KEY=VALUE]")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Model name.", show_default=False)] = None,
    model_store: Annotated[
        Path | None,
        typer.Option(help="Folder of models.", envvar="GRAPHKILN_MODEL_STORE", show_default="model_repository"),
    ] = None,
    version: Annotated[
        int | None, typer.Option(help="Version number.", show_default="the next free one", min=1)
    ] = None,
    recipe: Annotated[
        Path | None, typer.Option(help="YAML recipe, or the manifest.json of a conversion to repeat.")
    ] = None,
    print_recipe: Annotated[
        bool, typer.Option("--print-recipe", help="Print the whole recipe and do nothing.")
    ] = False,
    explain: Annotated[bool, typer.Option("--explain", help="List the passes and do nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest instead of a table.")] = False,
    list_pattern: Annotated[
        str | None, typer.Option("--list", help="List timm's architectures that fit a pattern.", metavar="PATTERN")
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(help="State dict: .pth, .pt or .safetensors.", rich_help_panel=_SOURCE)
    ] = None,
    pretrained: Annotated[
        bool | None, typer.Option("--pretrained", help="Published weights (internet).", rich_help_panel=_SOURCE)
    ] = None,
    features_only: Annotated[
        bool | None, typer.Option("--features-only", help="A backbone: feature maps (timm).", rich_help_panel=_SOURCE)
    ] = None,
    out_indices: Annotated[
        str | None, typer.Option(help="Which feature maps.", metavar="1,2,3", rich_help_panel=_SOURCE)
    ] = None,
    shape: Annotated[
        list[str] | None, typer.Option(help="Sizes of one sample.", metavar="[NAME=]3x224x224", rich_help_panel=_SOURCE)
    ] = None,
    keep_names: Annotated[
        bool | None, typer.Option("--keep-names", help="The source's own tensor names.", rich_help_panel=_EDGE)
    ] = None,
    dynamic: Annotated[
        list[str] | None,
        typer.Option(help="Another dimension that varies.", metavar="NAME:AXIS=MIN..MAX", rich_help_panel=_EDGE),
    ] = None,
    outputs: Annotated[
        list[str] | None, typer.Option(help="Keep this output, by the source's name.", rich_help_panel=_EDGE)
    ] = None,
    input: Annotated[  # noqa: A002 - the flag's name
        str | None, typer.Option(help="uint8-nhwc: raw image bytes.", rich_help_panel=_EDGE, show_default="source")
    ] = None,
    layout: Annotated[
        str | None, typer.Option(help="nchw or nhwc.", rich_help_panel=_EDGE, show_default="nchw")
    ] = None,
    softmax: Annotated[
        bool | None, typer.Option("--softmax", help="Answer probabilities.", rich_help_panel=_EDGE)
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Answer the k best and their indices.", rich_help_panel=_EDGE)
    ] = None,
    gradient: Annotated[
        str | None, typer.Option(help="Answer a gradient, too.", metavar="OUTPUT:INPUT", rich_help_panel=_EDGE)
    ] = None,
    preprocess: Annotated[
        str | None, typer.Option(help="How an image becomes the input.", metavar="JSON", rich_help_panel=_EDGE)
    ] = None,
    labels: Annotated[Path | None, typer.Option(help="Class names, one a line.", rich_help_panel=_EDGE)] = None,
    max_batch_size: Annotated[
        int | None, typer.Option(help="Largest batch that Triton forms.", rich_help_panel=_EDGE, show_default="32")
    ] = None,
    skip: Annotated[
        list[str] | None, typer.Option(help="Leave a pass out (see --explain).", metavar="PASS", rich_help_panel=_GRAPH)
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help="fp32, fp16, bf16 or int8.", rich_help_panel=_GRAPH, show_default="fp32")
    ] = None,
    amp: Annotated[
        str | None,
        typer.Option(
            help="O0 all fp32; O1 products only; O2 all but normalization and reductions; O3 all.",
            rich_help_panel=_GRAPH,
            show_default="O2",
        ),
    ] = None,
    keep_fp32: Annotated[
        list[str] | None, typer.Option(help="Nodes that stay fp32.", metavar="PATTERN", rich_help_panel=_GRAPH)
    ] = None,
    lower_edges: Annotated[
        bool | None,
        typer.Option("--lower-edges", help="fp16, bf16: inputs and outputs, too.", rich_help_panel=_GRAPH),
    ] = None,
    search_keep: Annotated[
        bool | None,
        typer.Option("--search-keep", help="Find the fewest nodes that must stay fp32.", rich_help_panel=_GRAPH),
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="Samples for int8: folder of images, or .npz.", rich_help_panel=_GRAPH)
    ] = None,
    calibration_method: Annotated[
        str | None,
        typer.Option(help="minmax, entropy or percentile.", rich_help_panel=_GRAPH, show_default="minmax"),
    ] = None,
    samples: Annotated[
        Path | None, typer.Option(help="Folder of images, or .npz.", rich_help_panel=_PROOF, show_default="made up")
    ] = None,
    reference: Annotated[
        Path | None,
        typer.Option(help="The source's own answers, recorded: .npz of INPUT_<i>, OUTPUT_<i>.", rich_help_panel=_PROOF),
    ] = None,
    relative_l2: Annotated[
        float | None, typer.Option(help="Looser limit of the error; recorded.", rich_help_panel=_PROOF)
    ] = None,
) -> None:
    """Convert a trained model into a proven version.

    A version whose outputs are not those of the model is not written.
    """
    given = {key: value for key, value in locals().items() if key in _FIELDS and value not in (None, [], "")}
    if list_pattern:
        _list(list_pattern)
        return
    if explain:
        _explain()
        return
    if "=" in source and ":" not in source.partition("=")[0]:
        overrides, given = [source, *(overrides or ())], {k: v for k, v in given.items() if k != "source"}
    from graphkiln_converters.recipe import read_recipe

    frozen = read_recipe(recipe, _values(given), overrides or ())
    if print_recipe:
        typer.echo(_yaml(frozen), nl=False)
        return
    _run(frozen, as_json=as_json)


_FIELDS = {
    *("source", "name", "model_store", "version", "weights", "pretrained", "features_only", "out_indices", "shape"),
    *("keep_names", "dynamic", "outputs", "input", "layout", "softmax", "top_k", "gradient", "preprocess", "labels"),
    *(
        "max_batch_size",
        "skip",
        "precision",
        "amp",
        "keep_fp32",
        "lower_edges",
        "search_keep",
        "calibration",
        "calibration_method",
    ),
    *("samples", "reference", "relative_l2"),
}


def _values(given: dict[str, Any]) -> dict[str, Any]:
    """Flags that hold a list or an object in one word, taken apart."""
    values = dict(given)
    try:
        if "out_indices" in values:
            values["out_indices"] = [int(word) for word in str(values["out_indices"]).split(",")]
        if "preprocess" in values:
            values["preprocess"] = json.loads(values["preprocess"])
    except ValueError as error:
        raise ConversionError(f"cannot read --out-indices or --preprocess: {error}") from error
    return values


def _run(recipe: Recipe, *, as_json: bool) -> None:
    from graphkiln.cli.report import show_conversion
    from graphkiln_backend.graph.manifest import MANIFEST_FILE, Manifest
    from graphkiln_converters.convert import convert as run

    folder = run(recipe, command=shlex.join(["graphkiln", *sys.argv[1:]]))
    if as_json:
        typer.echo((folder / MANIFEST_FILE).read_text(), nl=False)
    else:
        show_conversion(folder, Manifest.read(folder / MANIFEST_FILE))


def _list(pattern: str) -> None:
    from graphkiln_converters.sources.timm import list_architectures

    names = list_architectures(pattern)
    if not names:
        raise ConversionError(f"timm has no architecture like '{pattern}'", hint="patterns hold *, for example resnet*")
    typer.echo("\n".join(names))


def _explain() -> None:
    from graphkiln.cli.report import show_passes
    from graphkiln_backend.passes.catalog import catalog

    show_passes(catalog())


def _yaml(recipe: Recipe) -> str:
    import yaml

    return str(yaml.safe_dump(recipe.frozen(), sort_keys=False))
