"""Frozen dataclasses that are cheap to make: every instance is a process, and makes those of all its modules anew.

`dataclasses.dataclass` writes six functions for each class that is frozen and has slots, and compiles them one by one.
All but `__init__` are the same for every class here; what they do is what they do there.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from reprlib import recursive_repr
from typing import TYPE_CHECKING

__all__ = ["dataclass"]

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(*, frozen=False, slots=False, kw_only=False):
        """As `dataclasses.dataclass`, which makes what is not frozen, or has no slots."""
        if not (frozen and slots):
            return dataclasses.dataclass(frozen=frozen, slots=slots, kw_only=kw_only)
        return partial(_make, kw_only=kw_only)

    def _make(cls, *, kw_only):
        made = dataclasses.dataclass(cls, repr=False, eq=False, slots=True, kw_only=kw_only)
        for name, method in _METHODS.items():
            if name not in vars(cls):
                setattr(made, name, method)
        return made

    def _values(self):
        return tuple([getattr(self, field.name) for field in dataclasses.fields(self) if field.compare])

    def _equals(self, other):
        return _values(self) == _values(other) if other.__class__ is self.__class__ else NotImplemented

    def _hash(self):
        return hash(_values(self))

    @recursive_repr()
    def _show(self):
        shown = ", ".join(
            f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self) if field.repr
        )
        return f"{self.__class__.__qualname__}({shown})"

    def _set_once(self, name, value):
        """What `__init__` does; a slot that holds something is never written again."""
        if name not in self.__dataclass_fields__ or hasattr(self, name):
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
        object.__setattr__(self, name, value)

    def _never_delete(_, name):
        raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")

    _METHODS = {
        "__eq__": _equals,
        "__hash__": _hash,
        "__repr__": _show,
        "__setattr__": _set_once,
        "__delattr__": _never_delete,
    }
