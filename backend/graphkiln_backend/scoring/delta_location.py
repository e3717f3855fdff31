"""A folder that holds a table of Delta Lake, as deltalake names it."""

from __future__ import annotations

from graphkiln_backend.storage.address import RemoteAddress


def delta_location(text: str) -> tuple[str, dict[str, str]]:
    """Its location, and what deltalake must know of it beside the environment.

    Args:
        text: The folder: a path, or a bucket's address.

    Raises:
        RepositoryError: It is an address, but none that is known.
    """
    address = RemoteAddress.parse(text)
    if address is None:
        return text, {}
    endpoint = address.options.get("endpoint_url")
    options = {"aws_endpoint": endpoint, "aws_allow_http": "true"} if endpoint else {}
    if address.scheme == "s3":
        options["aws_conditional_put"] = "etag"
    return f"{address.scheme}://{address.root}", options
