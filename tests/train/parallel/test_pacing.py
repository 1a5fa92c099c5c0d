"""Which trainer may begin which update: the bound on staleness, and how a stretch ends."""

from __future__ import annotations

import random

from train.parallel.parameter_server.server import InStep, Pacing


class Naive(Pacing):
    """Looks only at how old weights are when they are drawn, which is never."""

    def may_draw(self, trainer: int) -> bool:
        assert self.staleness is not None
        return trainer not in self.held and self.started < self.limit


def ages_of(pacing: Pacing, trainers: int, updates: int, luck: random.Random) -> list[int]:
    """Let trainers draw and finish in any order; insist that each batch is drawn once."""
    pacing.open(version=0, limit=updates)
    ages, drawn = [], []
    while not pacing.over:
        ready = [trainer for trainer in range(trainers) if pacing.may_draw(trainer)]
        if ready and (not pacing.held or luck.random() < 0.6):
            drawn.append(pacing.draw(luck.choice(ready)).update)
        else:
            ticket = luck.choice(list(pacing.held.values()))
            ages.append(pacing.age([ticket]))
            pacing.apply([ticket])
    assert sorted(drawn) == list(range(updates))
    return ages


def test_the_bound_holds_in_every_order() -> None:
    for seed in range(300):
        luck = random.Random(seed)
        trainers, bound = luck.randint(1, 8), luck.randint(0, 6)
        ages = ages_of(Pacing(bound), trainers, 60, luck)
        assert max(ages) <= bound
        if bound == 0:
            # As one process: each gradient from the newest weights.
            assert set(ages) == {0}
    assert max(ages_of(Naive(2), 5, 200, random.Random(0))) > 2


def test_a_stop_lets_what_has_begun_be_finished_and_nothing_else() -> None:
    in_step = InStep(2)
    in_step.open(version=7, limit=20)
    first = in_step.draw(0)
    in_step.hurry()
    # The second half of an update.
    assert in_step.may_draw(1) and not in_step.may_draw(0) and not in_step.over
    in_step.apply([first, in_step.draw(1)])
    assert in_step.over and not in_step.may_draw(0)
    apart = Pacing()
    apart.open(version=7, limit=20)
    ticket = apart.draw(0)
    apart.hurry()
    assert not apart.may_draw(1) and not apart.over
    apart.apply([ticket])
    assert apart.over
