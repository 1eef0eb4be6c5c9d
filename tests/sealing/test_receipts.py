"""Receipts: their content and length, and that they contain no key and no user's name."""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import TYPE_CHECKING

from kvstore.node.audit import Audit
from kvstore.sealing.domain_key import Erased
from kvstore.sealing.receipts import Receipt, keys_digest
from tests.sealing.rig import ACME, STORE, FakeClock, at, new_keyring, opened, user, users

if TYPE_CHECKING:
    from pathlib import Path


def receipt(
    keys: tuple[Erased, ...],
    domain: bytes | None = user(1),
    blocks: int = 3,
    sessions: int = 1,
    *,
    is_encrypted: bool = True,
    overwritten: int = 0,
) -> Receipt:
    """A receipt of this node."""
    return Receipt(
        at_ms=1_763_716_000_123,
        tenant="acme",
        domain=domain,
        blocks=blocks,
        overwritten=overwritten,
        size_bytes=9_000_000,
        keys=keys,
        node="storage-1:7070",
        store_uuid=STORE,
        drives=(0, 1),
        sessions=sessions,
        is_encrypted=is_encrypted,
        clear_bytes=4096,
        peer="ipv4:1.2.3.4",
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


def test_a_repeated_erasure_names_its_own_keys_once_and_earlier_ones_separately() -> None:
    keyring, file = new_keyring()
    (one,) = keyring.ensure(users(1))
    first = json.loads(receipt(tuple(keyring.erase(users(1)))).line())
    assert (first["keys"], "earlier_keys" in first) == (1, False)
    again = json.loads(receipt(tuple(keyring.erase(users(1))), blocks=0, sessions=0).line())
    assert (again["how"], again["keys"], again["key_ids"], again["keys_digest"]) == (
        "nothing was stored",
        0,
        "",
        "",
    )
    assert (again["earlier_keys"], again["earlier_key_ids"]) == (1, first["key_ids"])
    assert again["earlier_at"] == "2025-11-21T09:06:43.000Z"
    rest = json.loads(receipt(tuple(keyring.erase(users(1)))).line())
    assert rest["how"] == "keys destroyed earlier"
    (other,) = keyring.ensure(users(1))
    assert other.number == one.number
    image = bytearray(file.durable)
    image[at(other.number + 1)] = image[at(other.number)]  # a copy of its slot
    erased = opened(bytes(image)).erase(users(1))
    assert [(key.number, key.id) for key in erased] == [(other.number, other.id)] * 2
    last = json.loads(receipt(tuple(erased)).line())
    assert (last["keys"], last["key_ids"]) == (1, f"{other.number}:{other.id.hex()}")
    assert "earlier_keys" not in last, "the domain had been in use again"


def test_a_repeated_erasure_of_a_tenant_names_no_key_as_its_own() -> None:
    keyring, _ = new_keyring()
    keyring.ensure(users(1, 2))
    first = json.loads(receipt(tuple(keyring.erase_tenant(ACME)), None).line())
    again = json.loads(receipt(tuple(keyring.erase_tenant(ACME)), None).line())
    assert (first["keys"], again["keys"], again["earlier_keys"]) == (3, 0, 3)
    assert again["earlier_key_ids"] == first["key_ids"]


def test_without_encryption_a_receipt_has_no_keys() -> None:
    said = json.loads(receipt((), is_encrypted=False).line())
    assert (said["how"], said["keys"], said["key_ids"], said["keys_digest"]) == ("overwritten", 0, "", "")
    assert "clear_bytes" not in said


def test_a_receipt_says_what_was_done_and_what_could_not_be_read() -> None:
    known = Erased(ACME, user(1), 7, b"k" * 8, 5)
    never = Erased(ACME, user(1), None, None, 5)
    unread = [Erased(bytes(16), bytes(16), number, None, 5) for number in range(100, 170)]
    for keys, blocks, overwritten, sessions, how in (
        ((known,), 3, 0, 1, "keys destroyed"),
        ((known,), 3, 2, 1, "keys destroyed, the rest overwritten"),
        ((known, *unread), 3, 0, 1, "keys destroyed"),
        ((never, *unread), 0, 0, 0, "unreadable slots overwritten"),
        ((never, *unread), 1, 1, 0, "unreadable slots and blocks overwritten"),
        ((never,), 0, 0, 0, "nothing was stored"),
        ((never,), 3, 3, 0, "overwritten"),
        ((never,), 0, 0, 1, "overwritten"),
    ):
        made = receipt(keys, blocks=blocks, sessions=sessions, overwritten=overwritten)
        said = json.loads(made.line())
        assert (said["how"], said["overwritten"]) == (how, overwritten)
        assert said["keys"] == int(known in keys)
        assert said["clear_bytes"] == 4096
        assert (said.get("unread_slots", 0), len(said.get("unread", "").split(","))) == (
            (70, 64) if unread[0] in keys else (0, 1)
        )
