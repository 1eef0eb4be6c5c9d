"""The bounds and tests that docs/sealing.md names exist."""

from __future__ import annotations

import re
from pathlib import Path

from kvstore import limits

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "sealing.md").read_text()


def test_the_page_has_these_bounds() -> None:
    for said in (
        f"at most {limits.KEYRING_SLOTS_MAX:,} slots ({limits.KEYRING_SLOTS_MAX >> 13} MiB)",
        f"at most {limits.KEYRING_TENANT_KEYS_MAX:,} keys of domains",
        f"up to {limits.KEYRING_STRAYS_MAX} of them",
        f"of the {limits.VAULT_KEYS_MAX:,} domains used last",
        f"tenants' keys (at most {limits.KEYRING_TENANTS_UNSEALED_MAX})",
        f"a message has at most {limits.BLOCK_BYTES_MAX >> 20} MiB",
        f"each stretch of {limits.ENCRYPT_STRETCH_BYTES >> 20} MiB",
        f"{limits.ENCRYPT_REST_MS} ms at least",
    ):
        assert said in PAGE, said
    assert limits.ENCRYPT_SHARE == 4, "at most a quarter of the time"
    assert limits.GENERATION_MAX == 2**56 - 1
    assert limits.BLOCK_BYTES_MAX < 64 << 30, "of a message of GCM"


def test_the_tests_that_the_page_names_exist() -> None:
    files = re.findall(r"`(tests/[\w/]+\.py)`", PAGE)
    assert len(files) >= 5
    for name in files:
        assert (ROOT / name).is_file(), name
    written = "".join(path.read_text() for path in sorted((ROOT / "tests" / "sealing").glob("test_*.py")))
    shown = re.findall(r"`([\w/]+\.py)::(test_\w+)`", PAGE)
    assert len(shown) > 50
    for name, test in shown:
        assert f"def {test}(" in (ROOT / "tests" / name).read_text(), f"{name}::{test}"
    named = re.findall(r"`(test_\w+)`", PAGE)
    assert len(named) >= 4
    for name in named:
        assert f"def {name}(" in written, name
