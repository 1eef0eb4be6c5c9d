"""Prometheus' own tool accepts alerts and configurations, and each alert fires when it should and not before."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy/prometheus"
ALERTS = FOLDER / "alerts.yaml"
CASES = FOLDER / "alerts_test.yaml"
CONFIGURATIONS = (FOLDER / "prometheus.yaml", ROOT / "deploy/compose/prometheus.yaml")
FETCHED = ROOT / ".cache/promtool"
WAIT_S = 60.0
NAMES = [rule["alert"] for rule in yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]]


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run promtool; the test is skipped without it."""
    found = FETCHED if FETCHED.exists() else shutil.which("promtool")
    if found is None:
        pytest.skip("there is no promtool: make promtool")
    command = [str(found), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)


def test_prometheus_reads_the_alerts_without_a_complaint() -> None:
    done = promtool("check", "rules", "--lint=all", "--lint-fatal", ALERTS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"SUCCESS: {len(NAMES)} rules found" in done.stdout


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=lambda path: path.parent.name)
def test_prometheus_reads_the_configurations(configuration: Path, tmp_path: Path) -> None:
    text = configuration.read_text()
    for name in set(re.findall(r"_file: (\S+)", text)):  # those of the machine where it will run
        stand_in = tmp_path / Path(name).name
        stand_in.write_text("a stand-in")
        text = text.replace(name, str(stand_in))
    shutil.copy(ALERTS, tmp_path)
    (tmp_path / "prometheus.yml").write_text(text)
    done = promtool("check", "config", tmp_path / "prometheus.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"SUCCESS: {len(NAMES)} rules found" in done.stdout


def test_every_alert_fires_when_it_should_and_only_then() -> None:
    done = promtool("test", "rules", CASES)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    checks: dict[str, list[bool]] = {name: [] for name in NAMES}
    for case in yaml.safe_load(CASES.read_text())["tests"]:
        instances = {
            found for one in case["input_series"] for found in re.findall(r'instance="(\w+)', one["series"])
        }
        assert "bad" in instances
        for check in case["alert_rule_test"]:
            checks[check["alertname"]].append(bool(check["exp_alerts"]))
    assert all(set(came) == {True, False} for came in checks.values()), checks


@pytest.mark.parametrize("how", ["never", "always", "at once"])
def test_alerts_that_fire_never_always_or_too_soon_are_detected(how: str, tmp_path: Path) -> None:
    rules = yaml.safe_load(ALERTS.read_text())
    planted = set()
    for rule in rules["groups"][0]["rules"]:
        change = {
            "never": {"expr": f"({rule['expr']}) * 0 > 1"},
            "always": {"expr": re.sub(r"(==|>) [\d.]+", ">= 0", rule["expr"])},
            "at once": {"for": "0s"} if "for" in rule else {},
        }[how]
        rule.update(change)
        planted |= {rule["alert"]} if change else set()
    (tmp_path / ALERTS.name).write_text(yaml.safe_dump(rules))
    shutil.copy(CASES, tmp_path)
    done = promtool("test", "rules", tmp_path / CASES.name)
    assert done.returncode == 1, done.stdout + done.stderr
    assert set(re.findall(r"alertname: (\w+)", done.stdout + done.stderr)) == planted
    assert len(planted) > len(NAMES) / 2
