"""`kvsim generate`, `replay` and `plan` as a person meets them."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import TYPE_CHECKING

import pytest

from sim.cli import main
from sim.replay.sweep import pareto

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    path = tmp_path / "chats.jsonl"
    assert main(["generate", "--sessions", "60", "--seed", "4", "--out", str(path)]) == 0
    assert capsys.readouterr().out == f"written: {path}\n"
    return path


def test_the_same_seed_makes_the_same_chats(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--sessions", "60", "--seed", "4"]) == 0
    assert capsys.readouterr().out == trace.read_text()


def test_paths_are_compared_side_by_side_and_reproducibly(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["replay", str(trace), "--model", "llama-3-8b", "--set", "gpus_per_engine=2"]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[0].split() == ["CPU-initiated", "triggered", "recompute"]
    for what in (
        "TTFT p99",
        "hit rate, blocks",
        "put backlog, most",
        "busy: drives",
        "USD per 1,000 requests",
    ):
        assert what in text
    for note in ("No failures, no other tenants.", "(--engine whole)"):
        assert note in text
    assert main(command) == 0
    assert capsys.readouterr().out == text


def test_json_has_full_precision(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(trace), "--path", "triggered", "--path", "recompute", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    triggered, recompute = document["paths"]["triggered"], document["paths"]["recompute"]
    assert triggered["hit_rate"] > 0.3
    assert triggered["gpu_prefill_s"] < recompute["gpu_prefill_s"]
    assert recompute["put_lag_p50_s"] is None
    each = triggered["utilisation_each"]["drives"]
    assert len(each) == 32
    assert sum(each) / 32 == pytest.approx(triggered["utilisation"]["drives"])


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [str(value) for name, value in attrs if name in {"src", "href"}]


def test_the_page_loads_nothing_from_elsewhere(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "page.html"
    assert main(["replay", str(trace), "--html", str(path)]) == 0
    table = capsys.readouterr().out
    text = path.read_text()
    page = _Page()
    page.feed(text)
    assert page.tags.count("svg") == 6, "a picture each, so that a phone can stack them"
    assert "prefers-color-scheme: dark" in text
    assert page.fetched == []
    assert "script" not in page.tags
    assert "@import" not in text
    assert re.findall(r"url\(", text) == []
    ttft = next(line for line in table.splitlines() if line.startswith("TTFT p50"))
    for cell in re.split(r" {2,}", ttft):
        assert f"<td>{cell}</td>" in text


SMALL_PLAN = ["plan", "--model", "llama-3-8b", "--users", "50", "--history-tokens", "2048"]


def test_a_plan_gives_its_reasons_and_tries_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL_PLAN, "--way", "recompute", "--way", "triggered", "--trial"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^triggered +[\d.,]+ .* 1 engine of 8 GPUs; 1 node of", text, re.MULTILINE)
    assert re.search(r"^engines +1 +1 +", text, re.MULTILINE)
    # One engine can compute all again, and nodes cost something.
    assert "Recommended: do not offload, compute every prompt again;" in text
    assert len(re.findall(r"tried with [\d,]+ turns: TTFT p50 .*, p99 .* of 1 s: kept", text)) == 2


def test_a_plan_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    command = [*SMALL_PLAN, "--way", "recompute"]
    assert main([*command, "--trial", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["recommended"] == "recompute"
    (plan,) = document["plans"]
    assert plan["trial"]["paths"]["recompute"]["ttft_p99_s"] <= 1.0
    assert [need["what"] for need in plan["least"]["needs"]] == ["engines"]
    assert main([*command, "--csv"]) == 0
    head, first = capsys.readouterr().out.splitlines()
    assert head.split(",")[:4] == ["point", "way", "users", "usd_per_hour"]
    assert first.split(",")[3] == str(plan["usd_per_hour"])


def test_where_no_cluster_keeps_the_deadline_the_plan_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["plan", "--model", "llama-3.1-405b", "--history-tokens", "100000", "--way", "triggered"]) == 0
    )
    text = capsys.readouterr().out
    assert "none: a turn whose history was not found takes" in text
    assert "No cluster within the bounds keeps the deadline" in text


def test_the_highest_rate_of_a_given_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    small = [
        "--set",
        "engines=1",
        "--set",
        "gpus_per_engine=1",
        "--set",
        "gpus_per_root=1",
        "--set",
        "nodes=1",
    ]
    assert main([*SMALL_PLAN, *small, "--highest-rate", "--way", "recompute", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["users"] > 10
    assert row["turns_per_s"] == pytest.approx(row["users"] / 69)


def test_a_sweep_varies_each_value_alone(
    trace: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plot = tmp_path / "cost.svg"
    command = ["replay", str(trace), "--model", "llama-3-8b", "--path", "triggered", "--json"]
    assert main([*command, "--sweep", "drives_per_node=2,4", "--plot", str(plot)]) == 0
    swept = json.loads(capsys.readouterr().out)
    assert [one["point"] for one in swept] == ["drives_per_node=2", "drives_per_node=4"]
    for drives, one in zip((2, 4), swept, strict=True):
        assert main([*command, "--set", f"drives_per_node={drives}"]) == 0
        assert json.loads(capsys.readouterr().out)["paths"] == one["paths"]
    assert "TTFT p99" in plot.read_text()
    assert main([*command[:-1], "--sweep", "policy=lru,s3fifo", "--csv"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[:2] for line in lines[1:]] == [
        ["policy=lru", "triggered"],
        ["policy=s3fifo", "triggered"],
    ]


def test_a_config_is_used_as_the_model_it_describes(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_size": 4096,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    command = ["replay", str(trace), "--path", "triggered", "--json"]
    assert main([*command, "--model", "llama-3-8b"]) == 0
    known = json.loads(capsys.readouterr().out)
    assert main([*command, "--config", str(path), "--parameters", "8.03e9"]) == 0
    assert json.loads(capsys.readouterr().out) == known
    # One layer of eight with attention, in 8 bits: a sixteenth of the KV.
    small = {"attn_layer_period": 8, "attn_layer_offset": 4, "torch_dtype": "float8_e4m3fn"}
    path.write_text(json.dumps({**config, **small}))
    assert main([*command, "--config", str(path), "--parameters", "8.03e9"]) == 0
    put = json.loads(capsys.readouterr().out)["paths"]["triggered"]["put_bytes"]
    assert put == pytest.approx(known["paths"]["triggered"]["put_bytes"] / 16, rel=0.05)
    assert main([*command, "--config", str(path)]) == 2
    assert capsys.readouterr().err.startswith("kvsim: --parameters is not given; it takes a number of")
    path.write_text(json.dumps({**config, "sliding_window": 1024}))
    assert main([*command, "--config", str(path), "--parameters", "8e9"]) == 2
    assert "with sliding windows; it takes a model, whose layers keep all tokens" in capsys.readouterr().err


def test_a_plan_can_be_swept_over_user_behaviour(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL_PLAN, "--way", "recompute", "--sweep", "users=20,2000", "--csv"]) == 0
    head, few, many = (line.split(",") for line in capsys.readouterr().out.splitlines())
    users, cost = head.index("users"), head.index("usd_per_hour")
    assert (few[users], many[users]) == ("20", "2000")
    assert float(few[cost]) < float(many[cost])


def test_of_pairs_only_the_undominated_remain() -> None:
    assert pareto([(1, 5), (2, 3), (3, 3), (4, 1), (1, 5)]) == [True, True, False, True, True]


def test_break_even_lists_every_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--break-even"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["llama-2-70b", "327,680", "3,584", "1.17", "9.4", "fetch"] in lines
    assert main(["plan", "--break-even", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["model"] == "gpt2-xl"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["replay", "nothing.jsonl"],
            "kvsim: TRACE: nothing.jsonl can't be read: No such file or directory.\n",
        ),
        (
            ["plan", "--set", "engines"],
            "kvsim: --set is 'engines'; it takes a name and its value, written NAME=V",
        ),
        (
            ["plan", "--set", "engines=x"],
            "kvsim: --set engines is 'x'; it takes a number of engines, from 1 to",
        ),
        (
            ["plan", "--sweep", "users=1,x"],
            "kvsim: --sweep users is 'x'; it takes a whole number, as the option itself takes it.",
        ),
        (["plan", "--sweep", "users"], "kvsim: --sweep is 'users'; it takes a name and its values, written"),
        (
            ["plan", "--sweep", "nothing=1"],
            "kvsim: --set is 'nothing'; it takes a name of the cluster, one of",
        ),
        (["curve", "--plot", "x.png"], "kvsim: --plot is x.png; it takes a file for a plot, named *.svg: "),
        (["plan", "--users", "0"], "kvsim: --users is 0; it takes a number of users, from 1 to 100,000,000."),
        (["generate", "--turns", "0"], "kvsim: --turns is 0; it takes turns of a session, from 1 to 1,000."),
    ],
)
def test_a_bad_argument_is_one_sentence_and_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(message)
    assert error.count("\n") == 1
