"""Real vLLM on one host, and on another one, with a node on a third: over TLS, with a token file."""

from __future__ import annotations

import json
import random
import subprocess
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.engines.engine import ARGUMENTS, ENVIRONMENT, PATIENT
from tests.hosts.conftest import CA, TOKEN
from tests.hosts.network import ROOT
from tests.hosts.test_shipped import firewall_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.hosts.conftest import Site
    from tests.hosts.network import Host

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not (ROOT / ".venv-engines").exists(), reason="vLLM is in .venv-engines: make setup-engines"
    ),
]

PYTHON = str(ROOT / ".venv-engines" / "bin" / "python")
MODEL_S, ENGINE_S, STORED_S = 120.0, 150.0, 60.0
SERVE = "kvstore serve --data /data --listen [::]:7070 --tenants /etc/kvstore/tenants.toml"
SERVE += " --tls-cert /etc/kvstore/tls.crt --tls-key /etc/kvstore/tls.key --hot 128MiB"
TOKENS, BLOCK = 700, 32


class Engine:
    """vLLM on a host, with our connector, controlled through `tests.engines.child`."""

    def __init__(self, host: Host, model: Path, extra: Mapping[str, str]) -> None:
        transfer = {
            "kv_connector": "TriggerKvConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"transport": "fabric", **PATIENT, **extra},
        }
        given = {
            **ARGUMENTS,
            "model": str(model),
            "disable_log_stats": False,
            "kv_transfer_config": transfer,
        }
        environment = {**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "GLOO_SOCKET_IFNAME": "lo"}
        self._process = host.start(
            *(PYTHON, "-m", "tests.engines.child", json.dumps(given)), environment=environment
        )
        assert json.loads(self._process.line(ENGINE_S)) == "ready"

    def _ask(self, **what: Any) -> Any:
        self._process.tell(json.dumps(what))
        return json.loads(self._process.line(ENGINE_S))

    def say(self, prompt: list[int]) -> tuple[list[int], int]:
        """The answer to a prompt, and how many of the prompt's tokens were not computed."""
        said = self._ask(do="say", prompts=[prompt], tokens=24)
        return said["answers"][0], said["cached"]

    def count(self, name: str) -> float:
        return float(self._ask(do="counts")[f"vllm:triggerkv_{name}"])

    def say_until_stored(self, blocks: int) -> None:
        """Generate until this many blocks are acknowledged, which vLLM learns only during a step."""
        within = time.monotonic() + STORED_S
        while self.count("stored_blocks") < blocks:
            assert time.monotonic() < within, "The blocks were not stored."
            self.say([7])

    def end(self) -> None:
        self._process.end(kill=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model made by the engines' Python, the one with torch."""
    folder = tmp_path_factory.mktemp("model") / "llama"
    make = "import sys, pathlib; from tests.engines.model import make_llama; make_llama(pathlib.Path(sys.argv[1]))"
    subprocess.run([PYTHON, "-c", make, str(folder)], cwd=ROOT, check=True, timeout=MODEL_S)
    return folder


def test_an_engine_on_another_host_loads_computed_blocks(site: Site, model: Path) -> None:
    site.node.firewall(firewall_of("container"))
    node = site.start_node(SERVE.split())
    reach = {"node": "node:7070", "ca": CA, "token_file": TOKEN}
    dice = random.Random(16)
    prompt = [dice.randrange(3, 999) for _ in range(TOKENS)]
    whole_blocks = TOKENS // BLOCK * BLOCK
    first = Engine(site.one, model, reach)
    answer, cached = first.say(prompt)
    assert cached == 0
    first.say_until_stored(whole_blocks // BLOCK)
    first.end()
    second = Engine(site.two, model, reach)
    assert second.say(prompt) == (answer, whole_blocks)
    assert second.count("hit_tokens") == whole_blocks
    assert second.count("missing_blocks") == 0
    second.end()
    assert "Traceback" not in site.one.log() + site.two.log()
    assert node.end() == 0
