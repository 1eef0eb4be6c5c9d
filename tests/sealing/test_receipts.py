"""Receipts: what they say, within which length, and that no key and no user's name is in them."""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import TYPE_CHECKING

from kvstore.node.audit import Audit
from kvstore.sealing.domain_key import Erased
from kvstore.sealing.receipts import Receipt, keys_digest
from tests.sealing.rig import ACME, STORE, FakeClock, new_keyring, user, users

if TYPE_CHECKING:
    from pathlib import Path


def receipt(keys: tuple[Erased, ...], domain: bytes | None = user(1)) -> Receipt:
    """One of this node's."""
    return Receipt(
        1_763_716_000_123, "acme", domain, 3, 9_000_000, keys, "storage-1:7070", STORE, (0, 1), "ipv4:1.2.3.4"
    )


def test_a_receipt_is_a_line_of_json_that_the_audit_log_has_too(tmp_path: Path) -> None:
    keyring, _ = new_keyring()
    keys = [bytes(key.key) for key in keyring.ensure(users(1, 2))]
    erased = keyring.erase([*users(1, 2), (ACME, user(9))])
    line = receipt(tuple(erased)).line()
    said = json.loads(line)
    assert "\n" not in line
    assert said["at"] == "2025-11-21T09:06:40.123Z"
    assert (said["what"], said["how"], said["keys"]) == ("erase-domain", "keys destroyed", 2)
    assert said["key_ids"] == ",".join(
        f"{one.number}:{one.id.hex()}" for one in erased[:2] if one.id is not None
    )
    assert said["domain"] == user(1).hex()
    assert (said["blocks"], said["bytes"], said["drives"], said["store"]) == (
        3,
        9_000_000,
        "0,1",
        STORE.hex(),
    )
    assert not [key for key in keys if key.hex() in line]

    with Audit(FakeClock(), tmp_path / "audit") as audit:
        made = receipt(tuple(erased))
        audit.note(made.what, tenant=made.tenant, peer=made.peer, **made.fields())
    assert {**json.loads((tmp_path / "audit").read_text()), "at_ms": said["at_ms"]} == said


def test_the_digest_covers_all_keys_and_the_line_names_the_first() -> None:
    keys = [Erased(ACME, user(number), number, number.to_bytes(8, "big"), 5) for number in range(1000)]
    said = json.loads(receipt(tuple(keys), None).line())
    assert (said["what"], said["keys"], len(said["key_ids"].split(","))) == ("erase-tenant", 1000, 64)
    expected = blake2b(digest_size=32, person=b"tkv receipt")
    for key in keys:
        assert key.number is not None
        assert key.id is not None
        expected.update(key.number.to_bytes(4, "little") + key.id)
    assert said["keys_digest"] == keys_digest(keys[::-1]) == expected.hexdigest()
    assert keys_digest(keys[1:]) != said["keys_digest"]


def test_without_sealing_nothing_is_said_of_keys() -> None:
    said = json.loads(receipt(()).line())
    assert (said["how"], said["keys"], said["key_ids"], said["keys_digest"]) == ("overwritten", 0, "", "")
