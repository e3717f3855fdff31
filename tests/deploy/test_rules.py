"""The alerts of deploy/prometheus, by Prometheus' `promtool test rules`."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml
from prometheus_server import needs_promtool


def _promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, check=False)


@pytest.fixture
def rules(repository: Path) -> Path:
    return repository / "deploy" / "prometheus" / "rules.yml"


def _run_tests(rules: Path, folder: Path, alert: str = "") -> subprocess.CompletedProcess[str]:
    """Run the tests of an alert, or all."""
    document = yaml.safe_load((Path(__file__).parent / "rules_test.yml").read_text()) | {"rule_files": [str(rules)]}
    document["tests"] = [each for each in document["tests"] if alert in str(each["alert_rule_test"])]
    tests = folder / "tests.yml"
    tests.write_text(yaml.safe_dump(document))
    return _promtool("test", "rules", tests)


@needs_promtool
def test_each_alert_fires_for_its_fault_and_for_nothing_else(rules: Path, tmp_path: Path) -> None:
    done = _run_tests(rules, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    tested = yaml.safe_load((tmp_path / "tests.yml").read_text())["tests"]
    fired = {case["alertname"] for each in tested for case in each["alert_rule_test"] if case.get("exp_alerts")}
    groups = yaml.safe_load(rules.read_text())["groups"]
    assert fired == {rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule}


@needs_promtool
@pytest.mark.parametrize(
    ("alert", "right", "wrong"),
    [
        ("Restarting", ") > 3", ") > 1"),
        ("Errors", ":ratio_rate5m > 0.01", ":ratio_rate5m > 0.2"),
        ("Stale", "(graphkiln_self_test_timestamp_seconds > 0)", "graphkiln_self_test_timestamp_seconds"),
        ("ComputesWrongly", '{cause="wrong_outputs"}', '{cause="server_died"}'),
        ("Errors", 'reason!="CANCELED"', 'reason!=""'),
        ("Errors", 'code!~"CANCELLED|INVALID_ARG"', 'code!~"CANCELLED"'),
        ("Errors", 'code!~"CANCELLED|INVALID_ARG"', 'code!~"INVALID_ARG"'),
        ("Errors", 'code!~"CANCELLED|INVALID_ARG"', 'code="unknown"'),
        ("RolloutDisagrees", '{bound="upper"} <', '{bound="lower"} <'),
        ("RolloutDisagrees", '{phase=~"shadow|traffic"}', ""),
        ("RolloutAborted", ',by="server"', ""),
    ],
)
def test_wrong_rules_fail_the_tests(rules: Path, tmp_path: Path, alert: str, right: str, wrong: str) -> None:
    changed = tmp_path / "rules.yml"
    assert right in rules.read_text()
    changed.write_text(rules.read_text().replace(right, wrong))
    done = _run_tests(changed, tmp_path, alert)
    assert done.returncode == 1, done.stdout + done.stderr


@needs_promtool
def test_the_configuration_of_compose_is_valid(repository: Path) -> None:
    done = _promtool("check", "config", repository / "deploy" / "prometheus" / "prometheus.yml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_manual_names_every_alert_and_no_other(rules: Path, repository: Path) -> None:
    table = (repository / "docs" / "operations.md").read_text()
    named = re.findall(r"^\| `(Graphkiln\w+)` \|", table, re.MULTILINE)
    groups = yaml.safe_load(rules.read_text())["groups"]
    assert named == [rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule]
    assert len(named) == 12


def test_rules_use_known_metrics(rules: Path, repository: Path) -> None:
    known = known_metrics(repository)
    groups = yaml.safe_load(rules.read_text())["groups"]
    recorded = {rule["record"] for group in groups for rule in group["rules"] if "record" in rule}
    asked = {name for group in groups for rule in group["rules"] for name in metrics_of(rule["expr"])}
    assert {re.sub(r"_(bucket|sum|count)$", "", name) if "batch_size" in name else name for name in asked} <= (
        known | recorded
    )
    assert len(asked) > 10


def known_metrics(repository: Path) -> set[str]:
    """Metrics of docs/metrics.md, which a test compares with a running server, and `up` of Prometheus."""
    text = (repository / "docs" / "metrics.md").read_text()
    return set(re.findall(r"^\| `([a-z_0-9]+)`", text, re.MULTILINE)) | {"up"}


def metrics_of(query: str) -> set[str]:
    """Metrics in a query."""
    plain = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\b(by|on) \([^)]*\)", "", query)
    return set(re.findall(r"\b([a-z][a-z_0-9:]*[_:][a-z_0-9:]*|up)\b(?!\s*\()", plain))
