"""The page of settings."""

from __future__ import annotations

from documenting import settings
from graphkiln_backend.lowering import settings as setting_keys


def test_every_known_key_is_there() -> None:
    page = settings.render()
    assert [key for key in setting_keys.KNOWN_KEYS if f"`{key}`" not in page] == []
    for known in (*setting_keys.GPU_ACCELERATORS.values(), *setting_keys.CPU_ACCELERATORS.values()):
        assert [key for key in known or () if f"`{key}`" not in page] == []


def test_what_a_setting_says_is_its_docstring() -> None:
    rows = {key: (values, said) for key, values, said in settings.own_settings()}
    assert set(rows) == {f"`{key}`" for key in setting_keys.OWN_KEYS}
    assert rows["`threads`"][1] == "Threads inside one operator."
    assert "`auto`" in rows["`engine`"][0]
    assert "`bf16`" in rows["`precision`"][0]
