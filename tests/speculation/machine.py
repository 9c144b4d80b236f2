"""A simulated engine: rounds take what a roofline says, and drafts are accepted with given rates."""

import numpy as np

from megatron_rlspec.types import OFF


class Machine:
    """Runs rounds by a rule. `cost` is the truth; `rates`, and what the drafter missed, may be changed between runs.

    ms, plain_ms  that the rounds took, and that plain decoding would have taken for the same tokens
    """

    def __init__(self, rule, cost, rates=(0.7,) * 7, noise=0.05, seed=0):
        self.rule, self.cost, self.rates, self.noise = rule, cost, rates, noise
        self.rng = np.random.default_rng(seed)
        self.chosen, self.ms, self.plain_ms = [], 0.0, 0.0
        self.behind = np.zeros(0, int)

    def ms_of(self, config, batch, length):
        return float(self.cost.grid([config], np.array(batch), np.array(batch * length))[0])

    def run(self, rounds, batch=8, length=1000):
        if len(self.behind) != batch:
            self.behind = np.zeros(batch, int)
        for _ in range(rounds):
            config = self.rule.choose(batch, batch * length, lambda n: int(np.sort(self.behind)[:n].sum()))
            accepted, read = [], 0
            drafting = self.rule.catch_up
            self.behind += 1
            if not config.off:
                first = np.argsort(self.behind, kind="stable")[:drafting]
                read = int((self.behind[first] - 1).sum())
                self.behind[first] = 0
                hits = self.rng.random((drafting, config.num_steps)) < np.array(self.rates[: config.num_steps])
                accepted = np.cumprod(hits, axis=1).sum(axis=1).tolist()
            self.rule.observe(config, accepted)
            caught_up = read * self.cost.catch_up_ms
            ms = self.ms_of(config, batch, length)
            slow = self.rng.lognormal(0, self.noise) * (5 if self.rng.random() < 0.01 else 1)
            self.rule.timed(config, batch, batch * length, ms * slow + caught_up, caught_up)
            self.chosen.append(config)
            self.ms += ms + caught_up
            self.plain_ms += self.ms_of(OFF, batch, length) * (batch + sum(accepted)) / batch
        return self.chosen[-rounds:]
