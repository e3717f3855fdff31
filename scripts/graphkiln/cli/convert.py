"""`graphkiln convert`: a trained model in, a proven version of a model repository out."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_args

import typer
from typer.core import TyperCommand

from graphkiln.cli.console import command_line, print_table
from graphkiln.cli.options import COMPUTE_LIMIT_S, ComputeLimit
from graphkiln.cli.sign import PassphraseFile, read_key
from graphkiln_backend.engines.compute_limit import limit_computing
from graphkiln_backend.graph.errors import ConversionError

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from graphkiln_backend.graph.manifest import Manifest
    from graphkiln_backend.repository.signing_keys import SigningKey
    from graphkiln_converters.recipe import Recipe


def convert(
    ctx: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            help="torchvision:ARCH, timm:ARCH, huggingface:DIR_OR_ID, decoder:DIR_OR_ID, oneflow:DIR, "
            "python:FILE_OR_MODULE:FACTORY, torchscript:FILE, mlflow:ADDRESS_OR_DIR, FILE.pt2, FILE.onnx, "
            "FILE.skops or FILE.keras.",
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
    sign: Annotated[
        Path | None, typer.Option(help="Sign the version with this private key: graphkiln sign.", metavar="FILE")
    ] = None,
    passphrase_file: PassphraseFile = None,
    compute_limit: ComputeLimit = COMPUTE_LIMIT_S,
) -> None:
    """Convert a trained model into a proven version.

    Nothing is written if the outputs differ from those of the model.
    """
    if list_pattern:
        _list(list_pattern)
        return
    if explain:
        _explain()
        return
    from graphkiln_converters.recipe_file import read_recipe

    options = parse_options(ctx.obj)  # filled by `RecipeCommand` below
    if "=" in source and ":" not in source.partition("=")[0]:
        overrides = [source, *(overrides or ())]
    elif source:
        options["source"] = source
    with limit_computing(compute_limit):
        full = read_recipe(recipe, options, overrides or [])
        if print_recipe:
            _print_recipe(full)
        else:
            _run(full, read_key(sign, passphrase_file) if sign else None, as_json=as_json)


def _list(pattern: str) -> None:
    from graphkiln_converters.sources.timm import list_architectures

    if not (names := list_architectures(pattern)):
        raise ConversionError(
            f"timm has no architecture like '{pattern}'", hint="patterns contain *, for example resnet*"
        )
    typer.echo("\n".join(names))


def _explain() -> None:
    from graphkiln_backend.passes.pipeline import catalog

    rows = [(graph_pass.name, graph_pass.summary, when) for graph_pass, when in catalog()]
    print_table(("pass", "what it does", "runs"), rows)


def _print_recipe(recipe: Recipe) -> None:
    import yaml

    typer.echo(yaml.safe_dump(recipe.frozen(), sort_keys=False), nl=False)


def _run(recipe: Recipe, key: SigningKey | None, *, as_json: bool) -> None:
    from graphkiln.cli.verify import requested_split
    from graphkiln_backend.graph.manifest import MANIFEST_FILE, Manifest
    from graphkiln_backend.repository.signing import sign_version
    from graphkiln_converters.convert import convert as run

    folder = run(recipe, command=command_line())
    signed = sign_version(folder.parent, int(folder.name), key) if key else None
    if as_json:
        typer.echo((folder / MANIFEST_FILE).read_text(), nl=False)
    else:
        show_conversion(folder, Manifest.read(folder / MANIFEST_FILE))
        if split := requested_split(folder):
            typer.echo(f"the whole graph is proven; parallel: {split} (config.pbtxt): graphkiln verify {folder}")
        if signed:
            typer.echo(f"signed {signed.signer}")


def show_conversion(folder: Path, manifest: Manifest) -> None:
    """Print what `graphkiln convert` wrote."""
    if manifest.conversion:
        passes = [
            (each.name, str(each.nodes_before), str(each.nodes_after), each.note) for each in manifest.conversion.passes
        ]
        print_table(("pass", "nodes before", "after", "note"), passes)
    print_table((), [*_facts(manifest), ("written", str(folder))])


def _facts(manifest: Manifest) -> Iterator[tuple[str, str]]:
    conversion = manifest.conversion
    errors = conversion.output_errors if conversion else {}
    outputs = manifest.signature.outputs
    yield "inputs", "\n".join(map(str, manifest.signature.inputs))
    yield (
        "outputs",
        "\n".join(f"{each}: error {errors[each.name]:.1e}" if each.name in errors else str(each) for each in outputs),
    )
    yield "proof", "\n".join(verification.verdict for verification in manifest.verification)
    if conversion:
        yield "graph", f"{conversion.precision}, {conversion.graph_bytes / 2**20:.1f} MB"
        yield "time", f"{conversion.seconds:.1f} s"
        yield from (("note", note) for note in conversion.notes)


# Options of the recipe: one for each of its fields that has a flag.


class RecipeCommand(TyperCommand):
    """Command with an option for each field of the recipe, or some of them, besides the options of its function.

    The function reads the given values from `ctx.obj`, by field. The options are created at the first access, so that
    `graphkiln --help` imports neither pydantic nor YAML. click's own types are `Any` here, because releases of typer
    differ in whether they are click's or typer's.

    Attributes:
        fields: Names of the fields; empty for all.
    """

    fields: ClassVar[tuple[str, ...]] = ()

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the arguments, the fields of the recipe, and the function's own options."""
        own: list[Any] = super().get_params(ctx)
        arguments = [param for param in own if param.param_type_name == "argument"]
        return [*arguments, *self._recipe_params, *(param for param in own if param not in arguments)]

    def invoke(self, ctx: Any) -> Any:
        """Call the function with its own options only."""
        fields = {param.name: ctx.params.pop(param.name) for param in self._recipe_params}
        ctx.obj = {name: value for name, value in fields.items() if value not in (None, (), [], "")}
        return super().invoke(ctx)

    @cached_property
    def _recipe_params(self) -> list[Any]:
        from graphkiln_converters.recipe import Recipe

        known = Recipe.model_fields
        return _params({name: known[name] for name in self.fields or known})


def parse_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Parse the values of options for the recipe: lists and objects are one word on the command line.

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
            raise ConversionError(f"cannot read {_flag_of(name)}: {error}") from error
    return values


def _params(fields: Mapping[str, FieldInfo]) -> list[Any]:
    """Create the parameters of a function whose parameters are the fields."""

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
    """Create the option of a field; None for a field without a flag."""
    from graphkiln_converters.recipe import Flag

    for flag in field.metadata:
        if isinstance(flag, Flag):
            default = flag.default or ("" if isinstance(field.default, bool) else str(field.default or ""))
            spelled = _flag_of(name)
            if field.annotation == bool | None:  # the default depends on the source
                spelled = f"{spelled}/--no-{spelled.removeprefix('--')}"
            return typer.Option(
                spelled,
                help=field.description,
                metavar=flag.metavar or None,
                rich_help_panel=flag.panel or None,
                show_default=default if default and not field.is_required() else False,
                min=flag.minimum,
                envvar=flag.variable or None,
            )
    return None


def _type(field: FieldInfo) -> Any:
    """Return the type that typer parses; types unknown to typer are strings, which the recipe checks."""
    kind = _kind(field)
    if kind == tuple[str, ...]:
        return list[str] | None
    return kind | None if kind in (bool, int, float, Path) else str | None


def _kind(field: FieldInfo) -> Any:
    """Return the type of a field without None."""
    kinds = [kind for kind in get_args(field.annotation) if kind is not NoneType]
    return kinds[0] if NoneType in get_args(field.annotation) else field.annotation


def _flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"
