"""Which weights these are: a digest that two engines share only if their weights are the same.

What always holds: a folder of up to `WHOLE_BYTES_MAX` of weights is hashed as a whole. Of a larger one each file's
name, size and beginning are, with pieces from all over it: other training changes all of them. A model of a hub goes by
its commit. Who patches single tensors of a large folder in place must say so (`weights` in the settings).
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

__all__ = ["weights_name"]

WHOLE_BYTES_MAX = 256 << 20
_PIECE_BYTES = 64 << 10
_PIECES = 64  # of a file
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def weights_name(model: str, revision: str | None, commit: str | None) -> str:
    """What tells a model's weights from all others, as well as it can be known here."""
    folder = Path(model)
    if folder.is_dir():
        return f"digest {_folder_digest(str(folder))}"
    return f"commit {commit}" if commit else f"{model} {revision or ''}"


def _folder_digest(folder: str) -> str:
    """Of all files with weights in a folder."""
    files = sorted(one for one in Path(folder).iterdir() if one.suffix in _SUFFIXES)
    stats = [one.stat() for one in files]
    return _digest(
        tuple((file, stat.st_size, stat.st_mtime_ns) for file, stat in zip(files, stats, strict=True))
    )


@lru_cache(maxsize=256)
def _digest(files: tuple[tuple[Path, int, int], ...]) -> str:
    """What a file was changed at is no part of the digest, but of whether it has to be made anew."""
    whole = sum(size for _, size, _ in files) <= WHOLE_BYTES_MAX
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
