"""The identity of weights: a digest that two engines share only if their weights are the same.

What always holds: a folder of up to `VLLM_WEIGHTS_HASHED_BYTES_MAX` of weights is hashed as a whole. For a larger one,
the digest covers each file's name, size and beginning, and samples from all over it: further training changes all of
them. A hub's model is identified by its commit. Ambiguous weights have no identity: a branch may have other content
tomorrow.
What it doesn't do: detect single tensors of a large folder patched in place; set `weights` after such a patch.
"""

from __future__ import annotations

import re
import secrets
from functools import cache, lru_cache
from hashlib import blake2b
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from kvstore.limits import VLLM_WEIGHTS_CACHED, VLLM_WEIGHTS_HASHED_BYTES_MAX

__all__ = ["adapter_name", "weights_name"]

_PIECE_BYTES = 64 << 10
_PIECES = 64  # of a file
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_ADAPTER_CONFIG = "adapter_config.json"  # its scale decides the KV as its weights do
_CONFIGS = ("config.json", "params.json")  # what any model of a hub has one of
_COMMIT = re.compile(r"[0-9a-f]{40}")


def weights_name(model: str, revision: str | None, commit: str | None) -> str:
    """The identity of a model's weights; "" if it can't be determined."""
    path = Path(model)
    if path.is_dir():
        return _name(_weights_in(path))
    if path.is_file():
        return _name([path])
    commit = commit or _commit_of(model, revision)
    return f"commit {commit}" if commit else ""


def adapter_name(path: str) -> str:
    """An adapter's identity. One that can't be identified gets a name unique to this process."""
    folder = Path(path)
    files = _weights_in(folder) if folder.is_dir() else []
    if not files:
        # A hub's newest commit may be fetched between now and its first use.
        return f"unknown {_this_process()} {path}"
    if (config := folder / _ADAPTER_CONFIG).is_file():
        files.append(config)
    return _name(files)


@cache
def _this_process() -> str:
    return secrets.token_hex(16)


def _commit_of(model: str, revision: str | None) -> str:
    """The commit of a hub's model in this machine's cache under a revision; it has been loaded by now."""
    if revision and _COMMIT.fullmatch(revision):
        return revision
    for name in _CONFIGS:
        try:
            file = try_to_load_from_cache(model, name, revision=revision)
        except ValueError:  # not a valid name of a hub's model
            return ""
        if isinstance(file, str) and _COMMIT.fullmatch(commit := Path(file).parent.name):
            return commit
    return ""


def _weights_in(folder: Path) -> list[Path]:
    return sorted(one for one in folder.iterdir() if one.suffix in _SUFFIXES)


def _name(files: list[Path]) -> str:
    """A digest of all of these; "" if there are none."""
    stats = [file.stat() for file in files]
    known = tuple((file, stat.st_size, stat.st_mtime_ns) for file, stat in zip(files, stats, strict=True))
    return f"digest {_digest(known)}" if files else ""


@lru_cache(VLLM_WEIGHTS_CACHED)
def _digest(files: tuple[tuple[Path, int, int], ...]) -> str:
    """A file's modification time is not part of the digest; it decides whether the digest is computed again."""
    whole = sum(size for _, size, _ in files) <= VLLM_WEIGHTS_HASHED_BYTES_MAX
    state = blake2b(digest_size=16, person=b"triggerkv weight")
    for file, size, _ in files:
        state.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as content:
            if whole:
                while piece := content.read(1 << 20):
                    state.update(piece)
                continue
            for number in range(_PIECES):
                content.seek(number * max(0, size - _PIECE_BYTES) // (_PIECES - 1))
                state.update(content.read(_PIECE_BYTES))
    return state.hexdigest()
