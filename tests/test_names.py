"""Names of blocks, tenants and layouts never change, because drives contain them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.names import block_key, layout_fingerprint, session_name, tenant_name, user_name

KEY = "1b3915500408a5c5101527daf76ced9e04a6c4b1220a88211625f54b72bf5268"
FINGERPRINT = "7ab3606f5d17ab26a2d2b899d88024bf"
TENANT = "3b28a7a59cb026a222482371f7cfc087"
USER = "f781b058382039e4c1f80782c364d46b"
SESSION = "a662f6cd3e76e1ca4019d5061d6fb3aa"
PARTS = st.lists(st.binary(max_size=20), max_size=5)


def test_names_are_the_same_in_every_version_and_on_every_machine() -> None:
    assert block_key(b"chat", b"7").hex() == KEY
    assert layout_fingerprint(b"model", b"bf16").hex() == FINGERPRINT
    assert tenant_name("default", b"salt").hex() == TENANT
    user = user_name(bytes.fromhex(TENANT), "ada")
    assert user.hex() == USER
    assert session_name(user, "chat 7").hex() == SESSION


def test_a_users_digest_reveals_nothing_without_the_tenants() -> None:
    one, other = user_name(b"a" * 16, "ada"), user_name(b"b" * 16, "ada")
    assert one != other
    assert session_name(one, "chat") != session_name(other, "chat")


@given(PARTS, PARTS)
def test_different_lists_of_parts_give_different_names(one: list[bytes], other: list[bytes]) -> None:
    assert (block_key(*one) == block_key(*other)) == (one == other)
