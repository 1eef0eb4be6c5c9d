"""Conversations of several users, in turns, with the answers of an engine without the store."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.engines.engine import Engine

USERS = 6
TURNS = 4
ANSWER_TOKENS = 24
LONG_TOKENS = 160


@dataclass(frozen=True)
class Chats:
    prompts: list[list[list[int]]]  # turn by turn, user by user: all tokens so far
    answers: list[list[list[int]]]
    long: list[list[int]]  # what is said to the first turn by one who may go on

    @classmethod
    def held_with(
        cls, engine: Engine, *, users: int = USERS, seed: int = 11, common_tokens: int = 0
    ) -> Chats:
        """Hold conversations that begin with this many tokens in common."""
        dice = random.Random(seed)
        common = [dice.randrange(3, 999) for _ in range(common_tokens)]
        histories = [list(common) for _ in range(users)]
        prompts, answers = [], []
        for _ in range(TURNS):
            for history in histories:
                history.extend(dice.randrange(3, 999) for _ in range(dice.randrange(60, 140)))
            prompts.append([list(history) for history in histories])
            said = engine.say(prompts[-1], tokens=ANSWER_TOKENS).answers
            answers.append(said)
            for history, answer in zip(histories, said, strict=True):
                history.extend(answer)
        return cls(prompts, answers, engine.say(prompts[0], tokens=LONG_TOKENS).answers)

    @property
    def last(self) -> list[list[int]]:
        return self.prompts[-1]

    def check_long(self, engine: Engine) -> None:
        """Hold the first turn, with answers that outgrow a small engine."""
        assert engine.say(self.prompts[0], tokens=LONG_TOKENS).answers == self.long

    def check(self, engine: Engine, turns: range | None = None) -> int:
        """Repeat the conversations with another engine: same answers. Returns how many tokens came from a cache."""
        cached = 0
        for turn in turns if turns is not None else range(TURNS):
            said = engine.say(self.prompts[turn], tokens=ANSWER_TOKENS)
            assert said.answers == self.answers[turn], f"turn {turn}"
            cached += said.cached
        return cached
