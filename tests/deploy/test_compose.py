"""deploy/compose: its files exist, and the server has the arguments of the Deployment."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml


@pytest.fixture
def folder(repository: Path) -> Path:
    return repository / "deploy" / "compose"


@pytest.fixture
def compose(folder: Path) -> dict[str, Any]:
    return yaml.safe_load((folder / "compose.yml").read_text())  # type: ignore[no-any-return]


def _mounts(service: dict[str, Any]) -> dict[str, str]:
    """Sources of mounts by path in the container, with the defaults of variables."""
    found = {}
    for volume in service["volumes"]:
        long = volume if isinstance(volume, dict) else {}
        source, target = (long["source"], long["target"]) if long else volume.split(":")[:2]
        found[target] = source.replace("${MODELS:-", "").replace("}", "")
    return found


def test_sources_of_mounts_exist(folder: Path, compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        for target, source in _mounts(service).items():
            if source.startswith("."):
                assert (folder / source).exists(), f"{name}: {source}"
            else:
                assert source in compose["volumes"], f"{name}: {target}"


def test_a_misspelt_store_is_an_error(compose: dict[str, Any]) -> None:
    (models,) = (each for each in compose["services"]["graphkiln"]["volumes"] if isinstance(each, dict))
    assert models["source"].startswith("${MODELS:-")
    assert (models["target"], models["read_only"], models["bind"]) == ("/models", True, {"create_host_path": False})


def test_the_server_has_the_arguments_of_the_deployment(folder: Path, compose: dict[str, Any]) -> None:
    server = compose["services"]["graphkiln"]
    deployment = yaml.safe_load((folder / "../kubernetes/base/deployment.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    arguments = set(pod["containers"][0]["args"]) - {
        "--load-deadline=600",
        "--cache-size=8G",
    }  # the default; no limit here
    assert arguments <= set(server["command"])
    assert server["read_only"] is True
    assert server["tmpfs"] == ["/tmp:exec"]
    assert f"--cache={next(where for where, name in _mounts(server).items() if name == 'cache')}" in server["command"]
    assert server["cap_drop"] == ["ALL"]
    assert server["stop_grace_period"] == f"{pod['terminationGracePeriodSeconds']}s"
    assert server["shm_size"] == "1gb"
    assert "--page" in server["command"]
    assert _ports(server) == [f"127.0.0.1:{port}:{port}" for port in (8000, 8001, 8003)]


def _ports(service: dict[str, Any]) -> list[str]:
    """Ports, with the defaults of variables."""
    return [re.sub(r"\$\{\w+:-(\d+)\}", r"\1", port) for port in service["ports"]]


def test_ports_are_local_and_can_be_changed(folder: Path, compose: dict[str, Any]) -> None:
    head = (folder / "compose.yml").read_text().partition("name: graphkiln")[0]
    for service in compose["services"].values():
        for port, default in zip(service["ports"], _ports(service), strict=True):
            (variable,) = re.findall(r"\$\{(\w+):-\d+\}", port)
            assert variable in head
            assert re.fullmatch(r"127\.0\.0\.1:(\d+):\1", default)


def test_other_images_name_their_registry(compose: dict[str, Any]) -> None:
    """Podman has no default registry."""
    others = [each["image"] for each in compose["services"].values() if "build" not in each]
    assert len(others) == 2
    assert all(re.fullmatch(r"docker\.io/\S+:v?\d+\.\d+\.\d+", image) for image in others)


def test_prometheus_and_grafana_find_each_other_and_the_server(folder: Path, compose: dict[str, Any]) -> None:
    services = compose["services"]
    scraped = yaml.safe_load((folder / "../prometheus/prometheus.yml").read_text())
    assert _mounts(services["prometheus"])["/etc/prometheus/prometheus.yml"] == "../prometheus/prometheus.yml"
    assert _mounts(services["prometheus"])[f"/etc/prometheus/{scraped['rule_files'][0]}"] == "../prometheus/rules.yml"
    (target,) = scraped["scrape_configs"][0]["static_configs"][0]["targets"]
    assert target.split(":") == ["graphkiln", "8002"]

    (source,) = yaml.safe_load((folder / "../grafana/datasource.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((folder / "../grafana/provider.yml").read_text())["providers"]
    mounts = _mounts(services["grafana"])
    dashboard = mounts[f"{provider['options']['path']}/graphkiln.json"]
    assert json.loads((folder / dashboard).read_text())["uid"] == "graphkiln"
