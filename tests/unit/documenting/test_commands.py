"""The page of commands."""

from __future__ import annotations

from documenting import commands


def test_every_command_is_there_with_its_options() -> None:
    page = commands.render()
    found = dict(commands.commands())
    assert len(found) > 25
    assert "graphkiln cache list" in found
    for name, command in found.items():
        section = page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        for param in commands.parameters(command):
            assert all(f"`{option}`" in section for option in param.opts if option.startswith("--")), (name, param.name)


def test_a_recipe_is_part_of_convert() -> None:
    section = commands.render().partition("## graphkiln convert\n")[2].partition("\n## ")[0]
    assert "`--int8-by`" in section
    assert "`GRAPHKILN_MODEL_STORE`" in section


def test_defaults_and_choices_are_told() -> None:
    page = commands.render()
    assert "`--objective` `throughput\\|latency\\|memory\\|cost`" in page
    assert "| *required* |" in page
    assert "half of what is free" in page
