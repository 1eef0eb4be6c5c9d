"""A process is killed while it makes and erases keys: what it acknowledged holds, in a real file."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

from kvstore.names import domain_tag
from kvstore.sealing.keyring import Keyring
from kvstore.sealing.keyring_file import keyring_path
from tests.sealing.rig import ACME, STORE, master

if TYPE_CHECKING:
    from pathlib import Path

ROUNDS = 5
CHILD = """
import sys
from pathlib import Path
from kvstore.sealing.keyring import Keyring
from tests.sealing.rig import ACME, STORE, master, user
ring = Keyring.open(Path(sys.argv[1]), master(), STORE)
turn = int(sys.argv[2]) * 1_000_000
while True:
    turn += 1
    made = ring.ensure([(ACME, user(turn * 10 + one)) for one in range(8)])
    print("made", *(f"{key.domain.hex()}={key.key.hex()}" for key in made), flush=True)
    gone = ring.erase([(ACME, user(turn * 10 + one)) for one in range(4)])
    print("gone", *(one.domain.hex() for one in gone), flush=True)
    if turn % 3 == 0:
        ring.rotate_tenant(ACME)
"""


def test_acknowledgements_of_a_killed_process_hold(tmp_path: Path) -> None:
    path = keyring_path(tmp_path)
    Keyring.create(path, master(), STORE)
    chance = random.Random(5)
    keys: dict[bytes, str] = {}
    gone: set[bytes] = set()
    for turn in range(ROUNDS):
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(path), str(turn)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(chance.randrange(4, 30))]
        os.kill(process.pid, signal.SIGKILL)
        lines += process.stdout.readlines()
        process.wait()
        process.stdout.close()
        for line in lines:
            if line.endswith("\n"):
                what, *words = line.split()
                if what == "made":
                    keys.update((bytes.fromhex(word[:32]), word[33:]) for word in words)
                else:
                    gone.update(map(bytes.fromhex, words))
        with Keyring.open(path, master(), STORE) as ring:
            for domain, secret in keys.items():
                key = ring.domain(ACME, domain)
                if domain in gone:
                    assert key is None
                    assert ring.erased_ms(ACME, domain_tag(domain)) is not None
                elif key is not None:
                    assert key.key.hex() == secret
                else:  # its erasure was under way, and nobody was told
                    assert ring.erased_ms(ACME, domain_tag(domain)) is not None
                    gone.add(domain)
            ring.rotate_tenant(ACME)
            assert ring.status().damaged == 0
    assert len(gone) > ROUNDS
    assert len(keys) > len(gone)
