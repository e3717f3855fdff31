"""How deltalake is told where a table lies."""

from __future__ import annotations

from graphkiln_backend.scoring.sources.places import delta_location


def test_a_path_is_one() -> None:
    assert delta_location("/mnt/photos of mine") == ("/mnt/photos of mine", {})


def test_a_bucket_of_another_service_is_named_with_its_endpoint() -> None:
    location, options = delta_location("s3://127.0.0.1:9000/bucket/table")
    assert location == "s3://bucket/table"
    assert options["aws_endpoint"].endswith("127.0.0.1:9000")
    assert delta_location("s3://bucket/table")[1].keys() == {"aws_conditional_put"}
    assert delta_location("gs://bucket/table") == ("gs://bucket/table", {})
