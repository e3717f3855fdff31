"""`graphkiln convert`: a trained model in, a proven version of a model repository out."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from typer.core import TyperCommand

from graphkiln.cli.console import command_line
from graphkiln.cli.options import COMPUTE_LIMIT_S, ComputeLimit
from graphkiln_backend.engines.compute_limit import limit_computing
from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.manifest import Conversion, Manifest
from graphkiln_backend.graph.signature import TensorSpec

# The options of `graphkiln convert`: one for each field of the recipe that has a flag, written nowhere else.

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo
    from rich.table import Table


class RecipeCommand(TyperCommand):
    """A command with an option for each field of the recipe, beside the options of its function.

    The function finds what was given in `ctx.obj`, by field. The options are made when they are first looked at:
    `graphkiln --help` pays for neither pydantic nor YAML. click's own types are `Any` here, because releases of typer
    differ in whether they are click's or typer's.
    """

    def get_params(self, ctx: Any) -> list[Any]:
        """The arguments, the fields of the recipe, and the function's own options."""
        own: list[Any] = super().get_params(ctx)
        arguments = [param for param in own if param.param_type_name == "argument"]
        return [*arguments, *self._recipe_params, *(param for param in own if param not in arguments)]

    def invoke(self, ctx: Any) -> Any:
        """Calls the function with its own options only."""
        fields = {param.name: ctx.params.pop(param.name) for param in self._recipe_params}
        ctx.obj = {name: value for name, value in fields.items() if value not in (None, (), [], "")}
        return super().invoke(ctx)

    @cached_property
    def _recipe_params(self) -> list[Any]:
        from graphkiln_converters.recipe import Recipe

        return _params(Recipe.model_fields)


def parse_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Parse values of options as the recipe takes them: lists and objects are one word on the command line.

    Raises:
        ConversionError: A value cannot be parsed.
    """
    from graphkiln_converters.recipe import Recipe

    values = dict(options)
    for name, value in options.items():
        kind = _kind(Recipe.model_fields[name])
        try:
            if kind == tuple[int, ...]:
                values[name] = [int(number) for number in value.split(",")]
            elif kind == dict[str, Any]:
                values[name] = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ConversionError(f"cannot read {_spelled(name)}: {error}") from error
    return values


def _params(fields: Mapping[str, FieldInfo]) -> list[Any]:
    """Parameters that typer makes for a function whose parameters are the fields."""

    def function() -> None:
        """Never called: typer reads its signature."""

    parameters = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[_type(field), option]
        )
        for name, field in fields.items()
        if (option := _option(name, field)) is not None
    ]
    vars(function)["__signature__"] = inspect.Signature(parameters)
    app = typer.Typer(add_completion=False)
    app.command()(function)
    params: list[Any] = typer.main.get_command(app).params
    return params


def _option(name: str, field: FieldInfo) -> Any:
    """The option of a field, or None for one without a flag."""
    from graphkiln_converters.recipe import Flag

    for flag in field.metadata:
        if isinstance(flag, Flag):
            default = flag.default or ("" if isinstance(field.default, bool) else str(field.default or ""))
            return typer.Option(
                _spelled(name),
                help=field.description,
                metavar=flag.metavar or None,
                rich_help_panel=flag.panel or None,
                show_default=default if default and not field.is_required() else False,
                min=flag.minimum,
                envvar=flag.variable or None,
            )
    return None


def _type(field: FieldInfo) -> Any:
    """Type that typer parses for a field; types unknown to it are strings, checked by the recipe."""
    kind = _kind(field)
    if kind == tuple[str, ...]:
        return list[str] | None
    return kind | None if kind in (bool, int, float, Path) else str | None


def _kind(field: FieldInfo) -> Any:
    """A field's type without None."""
    kinds = [kind for kind in get_args(field.annotation) if kind is not NoneType]
    return kinds[0] if NoneType in get_args(field.annotation) else field.annotation


def _spelled(name: str) -> str:
    return f"--{name.replace('_', '-')}"


# Tables for people: what a conversion, a proof and a graph look like, in 80 columns.

if TYPE_CHECKING:
    from graphkiln_backend.passes.base import Pass


def show_conversion(folder: Path, manifest: Manifest) -> None:
    """Print what `graphkiln convert` wrote."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    if manifest.conversion:
        console.print(_passes_table(manifest.conversion))
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, text in (*_facts(manifest), ("written", str(folder))):
        table.add_row(name, escape(text))
    console.print(table)


def _passes_table(conversion: Conversion) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table("pass", "nodes before", "after", "note")
    for record in conversion.passes:
        table.add_row(record.name, str(record.nodes_before), str(record.nodes_after), escape(record.note))
    return table


def _facts(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Name and text of each row."""
    yield "inputs", "\n".join(map(str, manifest.signature.inputs))
    yield "outputs", "\n".join(_output(manifest, spec) for spec in manifest.signature.outputs)
    yield "proof", "\n".join(verification.verdict for verification in manifest.verification)
    if conversion := manifest.conversion:
        yield "graph", f"{conversion.precision}, {conversion.graph_bytes / 2**20:.1f} MB"
        yield "time", f"{conversion.seconds:.1f} s"
        yield from (("note", note) for note in conversion.notes)


def _output(manifest: Manifest, spec: TensorSpec) -> str:
    error = manifest.conversion.output_errors.get(spec.name) if manifest.conversion else None
    return str(spec) if error is None else f"{spec}: error {error:.1e}"


def show_passes(passes: Iterable[tuple[Pass, str]]) -> None:
    """Print all passes and when they run."""
    from rich.console import Console
    from rich.table import Table

    table = Table("pass", "what it does", "runs")
    for graph_pass, when in passes:
        table.add_row(graph_pass.name, graph_pass.summary, when)
    Console().print(table)


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
    from graphkiln.cli.verify import requested_split
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
    from graphkiln_backend.passes.pipeline import catalog

    show_passes(catalog())


def _yaml(recipe: Recipe) -> str:
    import yaml

    return str(yaml.safe_dump(recipe.frozen(), sort_keys=False))
