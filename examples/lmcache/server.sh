#!/usr/bin/env bash
# LMCache's own server, with a node behind it. MODEL identifies the weights, because LMCache knows only a model's name.
#
#     examples/lmcache/server.sh MODEL
exec lmcache server --host 127.0.0.1 --port 5555 --http-host 127.0.0.1 --http-port 8080 \
  --chunk-size 128 --l1-size-gb 0.25 --eviction-policy LRU --max-workers 2 \
  --supported-transfer-mode auto --disable-observability \
  --l2-adapter "{\"type\": \"plugin\", \"module_path\": \"kvstore.engines.lmcache.l2\",
    \"class_name\": \"TriggerKvL2Adapter\", \"adapter_params\": {\"node\": \"127.0.0.1:7070\", \"weights\": \"$1\"}}"
