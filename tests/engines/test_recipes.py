"""The recipes of docs/engines.md for SGLang and LMCache, run as printed, as far as possible without an engine."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch", reason="torch is in .venv-engines only: make test-engines")

from tests.engines import lmcache_interface, sglang_interface  # noqa: E402

sglang_interface.load()
lmcache_interface.load()

from tests.engines.hostpool import MHAHostPool  # noqa: E402
from tests.engines.lmcache_objects import Arena, key  # noqa: E402

if TYPE_CHECKING:
    from tests.engines.node import Node

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore::DeprecationWarning")]

TEXT = (Path(__file__).resolve().parent.parent.parent / "docs" / "engines.md").read_text()


def recipe(language: str, word: str, node: str) -> str:
    """The one block of a language that has this word in it, with the node's address put in."""
    (block,) = [one for one in re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL) if word in one]
    assert "127.0.0.1:7070" in block
    return str(block).replace("127.0.0.1:7070", node)


def test_the_recipe_for_sglang(node: Node) -> None:
    from tests.engines.test_sglang import config

    words = shlex.split(recipe("sh", "sglang.launch_server", node.target).replace("\\\n", " "))
    assert words[words.index("--hicache-storage-backend") + 1] == "dynamic"
    extra = json.loads(words[words.index("--hicache-storage-backend-extra-config") + 1])
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    pool = MHAHostPool(words[words.index("--hicache-mem-layout") + 1])
    given = config(node.target)
    given.extra_config = extra
    storage = StorageBackendFactory.create_backend("dynamic", given, pool)
    storage.register_mem_pool_host(pool)
    assert storage.batch_set_v1(["page"], pool.indices(0)) == [True]
    assert storage.batch_exists(["page"]) == 1
    storage.close()


def test_the_recipe_for_lmcache_s_server(node: Node) -> None:
    from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import (
        PluginL2AdapterConfig,
        _create_plugin_adapter,
    )

    from tests.engines.test_lmcache_l2 import store

    said = json.loads(recipe("json", "kvstore.engines.lmcache.l2", node.target))
    assert said.pop("type") == "plugin"
    arena = Arena()
    adapter = _create_plugin_adapter(PluginL2AdapterConfig.from_dict(said), arena.desc)
    assert store(adapter, [key("recipe")], [arena.object(0)])
    adapter.close()


def test_the_recipe_for_lmcache_s_connector(node: Node, tmp_path: Path) -> None:
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.metadata import LMCacheMetadata
    from lmcache.v1.storage_backend.connector import CreateConnector

    file = tmp_path / "lmcache.yaml"
    file.write_text(recipe("yaml", "kvstore.engines.lmcache.connector", node.target))
    config = LMCacheEngineConfig.from_file(str(file))
    (plugin,) = config.remote_storage_plugins
    metadata = LMCacheMetadata("llama", 1, 1, 0, 0, torch.bfloat16, (2, 2, 256, 2, 32))
    loop = asyncio.new_event_loop()
    connector = CreateConnector(f"plugin://{plugin}", loop, None, config, metadata, plugin)
    assert connector.batched_contains([]) == 0
    loop.run_until_complete(connector.close())
    loop.close()
