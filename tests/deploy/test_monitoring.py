"""Every metric, label and alert in `deploy/` and the docs is exported by a running node; none is missing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from kvstore.errors import Overloaded
from kvstore.names import block_key
from kvstore.node.tenants import token_digest
from tests.conftest import pin_too_much, small_client, small_node
from tests.nic_offload.rig import wait_until
from tests.node.test_http import ask, bearer, http_url

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
ALERTS = ROOT / "deploy/prometheus/alerts.yaml"
SCRAPE = ROOT / "deploy/prometheus/prometheus.yaml"
DASHBOARD = ROOT / "deploy/grafana/kvstore.json"
RUNBOOK = ROOT / "docs/runbook.md"
METRICS = ROOT / "docs/metrics.md"

# What Prometheus adds to every sample by itself.
OF_PROMETHEUS = {"up": {"job", "instance"}}
ADDED_LABELS = {"job", "instance"}
NAME = re.compile(r"\b(up|(?:kvstore|process)_[a-z_]+)\b(\{[^}]*\})?")
GROUPED = re.compile(r"\b(?:by|on)\s*\(([^)]*)\)")


class Exported(NamedTuple):
    """A node's metrics: its families, and the labels of each sample's name."""

    families: dict[str, tuple[str, str, tuple[str, ...]]]  # type, help, labels
    labels: dict[str, set[str]]  # of samples
    values: set[tuple[str, str, str]]  # of them: name, label, value


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """The metrics that an observer gets once every labelled event has happened."""
    folder = tmp_path_factory.mktemp("deploy")
    tenants = folder / "tenants.toml"
    tenants.write_text(
        f'[acme]\ntokens_sha256 = ["{token_digest("acme")}"]\nobserver = true\nbytes = 1_000_000\n'
    )
    more = ("--http", "127.0.0.1:0", "--ui", "--tenants", str(tenants))
    with small_node(folder / "node", arguments=more) as node:
        with small_client(node.target, token="acme") as client:
            key = block_key(b"deploy")
            client.put_inline(key, b"abc")
            client.get_inline(key, 3)
            client.get_inline(block_key(b"nothing"), 3)
            client.exists([key])
            with pytest.raises(Overloaded):
                pin_too_much(client)
        scraped: list[bytes] = []

        def has_counted_the_failure() -> bool:
            scraped[:] = [ask(http_url(node) + "/metrics", bearer("acme"))[2]]
            return b"kvstore_calls_failed_total{" in scraped[0]

        wait_until(has_counted_the_failure, "the call that failed is counted, after its caller has the error")
    families, labels, values = {}, dict(OF_PROMETHEUS), set()
    for family in text_string_to_metric_families(scraped[0].decode()):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
            values |= {(sample.name, *pair) for pair in sample.labels.items()}
        own = {label for sample in family.samples for label in sample.labels} - {"le"}
        families[name] = (family.type, family.documentation, tuple(sorted(own)))
    return Exported(families, labels, values)


def alerts() -> list[Any]:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    return list(group["rules"])


def expressions() -> Iterator[tuple[str, str]]:
    for rule in alerts():
        yield rule["alert"], rule["expr"]
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def strangers(expression: str, labels: dict[str, set[str]]) -> Iterator[str]:
    """The names and labels in an expression that no node exports."""
    known = ADDED_LABELS | {"le"}
    for name, selector in NAME.findall(expression):
        if name not in labels:
            yield name
            continue
        own = labels[name] | ADDED_LABELS
        known |= own
        yield from (
            f"{name}{{{label}}}" for label in re.findall(r"(\w+)\s*=~?\"", selector) if label not in own
        )
    for group in GROUPED.findall(expression):
        yield from (f"by ({label})" for label in re.findall(r"\w+", group) if label not in known)


def test_every_expression_uses_exported_metrics_and_labels(exported: Exported) -> None:
    found = list(expressions())
    assert len(found) > 30
    for where, expression in found:
        assert NAME.search(expression), where
        assert list(strangers(expression, exported.labels)) == [], where


@pytest.mark.parametrize(
    ("expression", "stranger"),
    [
        ("rate(kvstore_put_total[5m])", "kvstore_put_total"),
        ('kvstore_hits_total{where="drive"}', "kvstore_hits_total{where}"),
        ("sum by (tenant) (kvstore_hits_total)", "by (tenant)"),
    ],
)
def test_an_invalid_name_is_detected(exported: Exported, expression: str, stranger: str) -> None:
    assert list(strangers(expression, exported.labels)) == [stranger]


def test_every_label_value_that_an_alert_selects_exists(exported: Exported) -> None:
    text = ALERTS.read_text() + RUNBOOK.read_text()
    picked = set(re.findall(r'(kvstore_\w+)\{(\w+)="(\w+)"\}', text))
    assert ("kvstore_waiting", "what", "put_for_room") in picked
    assert picked <= exported.values


def test_each_alert_has_its_section_and_each_section_its_alert() -> None:
    sections = re.findall(r"^## (\w+)$", RUNBOOK.read_text(), re.MULTILINE)
    assert sections == [rule["alert"] for rule in alerts()]
    for rule in alerts():
        assert rule["annotations"]["runbook"] == f"docs/runbook.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in {"page", "ticket", "info"}
    for section in re.split(r"^## ", RUNBOOK.read_text(), flags=re.MULTILINE)[1:]:
        assert [word for word in ("**Means**", "**Look at**", "**Do**") if word not in section] == [], section


def test_every_name_in_the_runbook_exists(exported: Exported) -> None:
    text = RUNBOOK.read_text()
    # A histogram is spoken of by its family's name.
    names = set(re.findall(r"`((?:kvstore|process)_[a-z_]+)", text))
    assert names <= set(exported.labels) | set(exported.families)
    anchors = {f"#{section.lower()}" for section in re.findall(r"^## (\w+)$", text, re.MULTILINE)}
    assert set(re.findall(r"\]\((#\w+)\)", text)) <= anchors
    for link in re.findall(r"\]\(([\w./]+)\)", text):
        assert (RUNBOOK.parent / link).exists(), link


def test_the_table_of_metrics_matches_the_nodes(exported: Exported) -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*?) \| (.*?) \|$", METRICS.read_text(), re.MULTILINE)
    ours = {name: told for name, told in exported.families.items() if name.startswith("kvstore_")}
    said = {name: (kind, text, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels, text in rows}
    assert said == ours


def test_metric_names_follow_prometheus_rules(exported: Exported) -> None:
    for name, (kind, text, labels) in exported.families.items():
        if not name.startswith("kvstore_"):
            continue
        assert (kind == "counter") == name.endswith("_total"), name
        assert kind != "histogram" or name.endswith("_seconds"), name
        assert not re.search(r"_(ms|us|ns|kib|mib|percent)(_|$)", name), name
        assert text.endswith("."), name
        assert not {"user", "session", "key", "peer"} & set(labels), name


def test_grafana_can_load_the_dashboard() -> None:
    board = json.loads(DASHBOARD.read_text())
    assert {"uid", "title", "schemaVersion", "templating", "panels", "time"} <= set(board)
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}"
            assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]) > 0
            assert panel["description"].endswith(".")


def test_the_example_scrapes_the_job_that_the_alerts_use() -> None:
    example = yaml.safe_load(SCRAPE.read_text())
    (job,) = example["scrape_configs"]
    assert example["rule_files"] == [ALERTS.name]
    assert f'job="{job["job_name"]}"' in ALERTS.read_text()
    assert job["scheme"] == "https"
