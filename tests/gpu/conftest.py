"""Requires PyTorch for CUDA and a GPU. Without them `make test` skips these tests, and `make test-gpu` fails."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from nic_offload.cuda_device import CudaDevice
from nic_offload.errors import CudaUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FIGURES = Path("build/bench/gpu.json")


def _absent(reason: str) -> None:
    if os.environ.get("TRIGGERKV_GPU"):
        pytest.fail(reason)
    pytest.skip(reason)


def library(name: str) -> Any:
    """The path of a library that `make test-gpu` installs."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        _absent(str(error))


@pytest.fixture(scope="session")
def torch() -> Any:
    try:
        CudaDevice().close()
        module = importlib.import_module("torch")
    except (CudaUnavailable, ImportError) as error:
        _absent(str(error))
    if not module.cuda.is_available():
        _absent(
            "The driver has a GPU, and PyTorch does not: it is built without CUDA, or for another driver."
        )
    return module


@pytest.fixture
def device(torch: Any) -> Iterator[CudaDevice]:
    torch.cuda.init()
    with_gpu = CudaDevice()
    yield with_gpu
    with_gpu.close()


@pytest.fixture(scope="session")
def figure(torch: Any) -> Iterator[Callable[[str, float], None]]:
    """Records a figure of this GPU."""
    figures: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    yield figures.__setitem__
    FIGURES.parent.mkdir(parents=True, exist_ok=True)
    FIGURES.write_text(json.dumps(figures, indent=2))
