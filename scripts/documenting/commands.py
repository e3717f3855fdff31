"""docs/reference/cli.md: every command and option, as typer knows them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import typer
from typer.main import get_command

from documenting.text import code, table
from graphkiln.cli.main import app

_INTRODUCTION = """# Commands

Written by `scripts/docs` from the program itself. `graphkiln COMMAND --help` says the same, and `graphkiln
--install-completion` has a shell complete it. Exit codes are those of [the errors](errors.md): 2 is a mistake of the
user's, which one line tells.

"""


def render() -> str:
    """The page."""
    return _INTRODUCTION + "\n".join(_section(name, command) for name, command in commands())


def commands() -> Iterator[tuple[str, Any]]:
    """Name and click's command of each, those of groups too, in the order of the help."""
    yield from _leaves("graphkiln", get_command(app))


def _leaves(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    if not hasattr(command, "commands"):
        yield name, command
        return
    for word, each in command.commands.items():
        yield from _leaves(f"{name} {word}", each)


def parameters(command: Any) -> list[Any]:
    """Its arguments and options, without `--help` and what is hidden."""
    params: list[Any] = command.get_params(typer.Context(command, info_name=command.name))
    return [param for param in params if param.name != "help" and not param.hidden]


def _section(name: str, command: Any) -> str:
    params = parameters(command)
    arguments = [_value(param) for param in params if param.param_type_name == "argument"]
    usage = " ".join([name, *arguments, "[OPTIONS]"])
    listed = table(["argument or option", "says", "default", "environment"], map(_row, params))
    return f"## {name}\n\n```text\n{usage}\n```\n\n{_help(command)}\n{listed}"


def _help(command: Any) -> str:
    return inspect.cleandoc(command.help or "").replace("\f", "") + "\n"


def _row(param: Any) -> tuple[str, str, str, str]:
    variable = param.envvar[0] if isinstance(param.envvar, list | tuple) else param.envvar
    return _names(param), param.help or "", _default(param), code(variable or "")


def _names(param: Any) -> str:
    if param.param_type_name == "argument":
        return code(_value(param))
    names = ", ".join(code(name) for name in (*param.opts, *param.secondary_opts))
    return names if param.is_flag else f"{names} {code(_value(param))}"


def _value(param: Any) -> str:
    return str(param.metavar or "|".join(_choices(param)) or param.name.upper().rstrip("_"))


def _choices(param: Any) -> list[str]:
    """Releases of typer keep them in different places."""
    known = getattr(getattr(param, "type_descriptor", None), "choices", None) or getattr(
        getattr(param, "type", None), "choices", None
    )
    return [str(getattr(each, "value", each)) for each in known or ()]


def _default(param: Any) -> str:
    if isinstance(param.show_default, str):
        return param.show_default
    if param.required:
        return "*required*"
    is_shown = param.show_default and param.default not in (None, "", (), [], False) and not callable(param.default)
    return code(str(getattr(param.default, "value", param.default))) if is_shown else ""
