"""An engine that keeps tensors in memory, with every way of failing that the protocol allows.

It behaves as `RolloutEngine` says: tensors are replaced one by one as they arrive, so a session that breaks leaves a
mixture, and the engine then refuses to generate until a later session succeeds. Its drafts are accepted at `acceptance`
per depth while its drafter's bits are those of `good_drafter` (name -> fingerprint; empty: always), else never. So
decisions can be tested without a real drafter.
"""

from __future__ import annotations

import numpy as np
import torch

from megatron_rlspec.engine import EngineError
from megatron_rlspec.push.fingerprint import fingerprint
from megatron_rlspec.types import OFF, RoundStats, Sample, SpecConfig


class MemoryEngine:
    bucket_memory = None

    def __init__(self, name: str = "memory", acceptance: float = 0.8, seed: int = 0) -> None:
        self.name = name
        self.acceptance = acceptance
        self.tensors: dict[str, torch.Tensor] = {}
        self.version = -1
        self.serving = False
        self.good_drafter: dict[str, int] = {}
        self.waiting = OFF  # the configuration to run; stored while speculation is held
        self.held = ""
        self.configs: list[str] = []
        self.sessions: list[tuple[int, str, int]] = []  # version, scope, tensors received
        self.fail_at: int | None = None  # raise after this number of tensors of a session
        self.wire = lambda name, tensor: (name, tensor)  # what happens to a tensor on its way in
        self.after_update = lambda engine: None
        self._random = np.random.default_rng(seed)

    def begin_update(self, version, scope="all"):
        self.serving = False
        self.update = (version, scope)
        self.received = 0

    def send(self, bucket):
        for name, tensor in bucket.tensors:
            if self.fail_at is not None and self.received >= self.fail_at:
                version = self.update[0]
                raise EngineError(f"{self.name}: connection lost after {self.received} tensors of version {version}")
            self.received += 1
            arrived = self.wire(name, tensor)
            if arrived is not None:
                self.tensors[arrived[0]] = arrived[1].clone()

    def end_update(self, error=""):
        self.serving = not error
        if not error:
            self.sessions.append((*self.update, self.received))
            self.version = self.update[0]
            self.after_update(self)

    def fingerprints(self):
        return {name: fingerprint(tensor) for name, tensor in self.tensors.items()}

    @property
    def config(self) -> SpecConfig:
        return OFF if self.held else self.waiting

    def hold(self, reason):
        self.held = reason
        self.configs.append("off")

    def release(self):
        self.held = ""

    def set_config(self, config, sharpness=None):
        self.waiting = config
        self.configs.append(str(config))

    def generate(self, requests, sampling):
        if not self.serving:
            raise EngineError(f"{self.name}: no weights since a failed update")
        steps = self.config.num_steps
        good = all(fingerprint(self.tensors[n]) == mark for n, mark in self.good_drafter.items())
        samples = []
        for request in requests:
            accepted = [0] * (steps + 1)
            produced = 0
            while produced < sampling.max_new_tokens:
                run = 0
                while run < steps and good and self._random.random() < self.acceptance:
                    run += 1
                accepted[run] += 1
                produced += run + 1
            tokens = np.concatenate([request.prompt.tokens, np.zeros(sampling.max_new_tokens, np.int64)])
            mask = np.arange(len(tokens)) >= len(request.prompt.tokens)
            span = (self.version, len(request.prompt.tokens), len(tokens))
            samples.append(
                Sample(request.id, request.prompt, tokens, mask.astype(np.float32), np.zeros(len(tokens), np.float32),
                       policy_versions=(span,), accepted=tuple(accepted) if steps else ())
            )  # fmt: skip
        return samples

    def stats(self) -> list[RoundStats]:
        return []

    def close(self) -> None:
        self.serving = False
