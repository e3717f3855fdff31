"""The options of `graphkiln convert`: one for each field of the recipe that has a flag, written nowhere else."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from typer.core import TyperCommand

from graphkiln_backend.graph.errors import ConversionError

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo


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
    """Values of options by field, as the recipe takes them: lists and objects that are written in one word are parsed.

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
    """What typer makes of a function whose parameters are the fields."""

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
    """What typer reads for a field; what it does not know is a word here, and checked by the recipe."""
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
