"""Where the libraries of custom operators lie that a configuration names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from graphkiln_backend.graph.errors import RepositoryError


def find_libraries(names: Sequence[str], model: Path) -> tuple[str, ...]:
    """The libraries, as the system's loader takes them.

    A relative path starts at the server's working directory, as in Triton's C++ backend, or else at the model's folder;
    a bare name that is in neither is left to the loader, which looks in LD_LIBRARY_PATH.

    Args:
        names: `model_operations.op_library_filename` of the configuration.
        model: The model's folder.

    Raises:
        RepositoryError: There is no such file.
    """
    return tuple(_find(name, model) for name in names)


def _find(name: str, model: Path) -> str:
    places = [Path(name).absolute(), model.absolute() / name]  # an absolute one stays as it is
    for place in places:
        if place.is_file():
            return str(place)
    if "/" not in name and name:
        return name
    looked = " and ".join(dict.fromkeys(map(str, places)))
    raise RepositoryError(
        f"op_library_filename names the library '{name}', which is missing",
        hint=f"looked for {looked}: write an absolute path, or put the library into the model's folder",
    )
