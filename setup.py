"""Builds the four C extensions through cffi; everything else about the project is in pyproject.toml."""

from setuptools import setup

setup(
    cffi_modules=[
        "nic_offload/_build.py:ffi",
        "kvstore/storage/_build.py:ffi",
        "kvstore/storage/keep/_build.py:ffi",
        "sim/replay/_build.py:ffi",
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
