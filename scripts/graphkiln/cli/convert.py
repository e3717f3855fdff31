"""`graphkiln convert`: a trained model in, a proven version of a model repository out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphkiln.cli.options import COMPUTE_LIMIT_S, ComputeLimit
from graphkiln.cli.recipe_options import parse_options
from graphkiln.cli.report_file import command_line
from graphkiln_backend.engines.compute_limit import limit_computing
from graphkiln_backend.graph.errors import ConversionError

if TYPE_CHECKING:
    from graphkiln_converters.recipe import Recipe


def convert(
    ctx: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            help="torchvision:ARCH, timm:ARCH, huggingface:DIR_OR_ID, decoder:DIR_OR_ID, oneflow:DIR, "
            "python:FILE_OR_MODULE:FACTORY, torchscript:FILE, FILE.pt2, FILE.onnx, FILE.skops or FILE.keras.",
            show_default=False,
        ),
    ] = "",
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Recipe keys, for example preprocess.mean=[0.5].", metavar="[KEY=VALUE]")
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
    compute_limit: ComputeLimit = COMPUTE_LIMIT_S,
) -> None:
    """Convert a trained model into a proven version.

    A version whose outputs are not those of the model is not written.
    """
    if list_pattern:
        _list(list_pattern)
    elif explain:
        _explain()
    else:
        options = parse_options(ctx.obj)
        if "=" in source and ":" not in source.partition("=")[0]:
            overrides = [source, *(overrides or ())]
        elif source:
            options["source"] = source
        with limit_computing(compute_limit):
            _convert(recipe, options, overrides or [], print_recipe=print_recipe, as_json=as_json)


def _convert(
    path: Path | None, options: Mapping[str, Any], overrides: Sequence[str], *, print_recipe: bool, as_json: bool
) -> None:
    from graphkiln_converters.recipe_file import read_recipe

    recipe = read_recipe(path, options, overrides)
    if print_recipe:
        typer.echo(_yaml(recipe), nl=False)
    else:
        _run(recipe, as_json=as_json)


def _run(recipe: Recipe, *, as_json: bool) -> None:
    from graphkiln.cli.report import show_conversion
    from graphkiln.cli.split_proof import requested_split
    from graphkiln_backend.graph.manifest import MANIFEST_FILE, Manifest
    from graphkiln_converters.convert import convert as run

    folder = run(recipe, command=command_line())
    if as_json:
        typer.echo((folder / MANIFEST_FILE).read_text(), nl=False)
    else:
        show_conversion(folder, Manifest.read(folder / MANIFEST_FILE))
        if split := requested_split(folder):
            typer.echo(f"the whole graph is proven; parallel: {split} (config.pbtxt): graphkiln verify {folder}")


def _list(pattern: str) -> None:
    from graphkiln_converters.sources.timm import list_architectures

    if not (names := list_architectures(pattern)):
        raise ConversionError(f"timm has no architecture like '{pattern}'", hint="patterns hold *, for example resnet*")
    typer.echo("\n".join(names))


def _explain() -> None:
    from graphkiln.cli.report import show_passes
    from graphkiln_backend.passes.catalog import catalog

    show_passes(catalog())


def _yaml(recipe: Recipe) -> str:
    import yaml

    return str(yaml.safe_dump(recipe.frozen(), sort_keys=False))
