"""The whole configuration of a run, and the checks between its sections."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Literal

from pydantic import model_validator

from megatron_rlspec.config.algorithm import AlgorithmConfig
from megatron_rlspec.config.answer import AnswerConfig
from megatron_rlspec.config.base import ConfigError, Section
from megatron_rlspec.config.data import DataConfig
from megatron_rlspec.config.drafter import DrafterConfig
from megatron_rlspec.config.health import HealthConfig
from megatron_rlspec.config.log import LogConfig
from megatron_rlspec.config.model import ModelConfig
from megatron_rlspec.config.optimizer import OptimizerConfig
from megatron_rlspec.config.parallel import ParallelConfig
from megatron_rlspec.config.placement import PlacementConfig
from megatron_rlspec.config.push import PushConfig
from megatron_rlspec.config.replay import ReplayConfig
from megatron_rlspec.config.reward import RewardConfig
from megatron_rlspec.config.rollout import RolloutConfig
from megatron_rlspec.config.run_dir import taken_by
from megatron_rlspec.config.sft import SftConfig
from megatron_rlspec.config.spec import SpecSection
from megatron_rlspec.config.tail import TailConfig
from megatron_rlspec.config.train import TrainConfig

Command = Literal["train", "sft", "replay"]


class Config(Section):
    """One run. Sections are independent of each other, but for the cross-checks below."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    spec: SpecSection = SpecSection()
    tail: TailConfig = TailConfig()
    placement: PlacementConfig = PlacementConfig()
    push: PushConfig = PushConfig()
    health: HealthConfig = HealthConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    drafter: DrafterConfig = DrafterConfig()
    parallel: ParallelConfig = ParallelConfig()
    sft: SftConfig = SftConfig()
    answer: AnswerConfig = AnswerConfig()
    train: TrainConfig = TrainConfig()
    log: LogConfig = LogConfig()
    replay: ReplayConfig = ReplayConfig()

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        if self.rollout.engine != "embedded" and (
            self.spec.topk > 1 or self.spec.tree_budget != "none"
        ):
            asked = (
                f"spec.topk={self.spec.topk}"
                if self.spec.topk > 1
                else f"spec.tree_budget={self.spec.tree_budget}"
            )
            raise ValueError(
                f"{asked} needs rollout.engine=embedded, but rollout.engine={self.rollout.engine}"
            )
        if self.rollout.max_new_tokens >= self.model.max_length:
            raise ValueError(
                f"rollout.max_new_tokens={self.rollout.max_new_tokens} leaves no room for a prompt "
                f"in model.max_length={self.model.max_length}"
            )
        if self.algorithm.overlong_tokens > self.rollout.max_new_tokens:
            raise ValueError(
                f"algorithm.overlong_tokens={self.algorithm.overlong_tokens} is longer than "
                f"rollout.max_new_tokens={self.rollout.max_new_tokens}"
            )
        if self.algorithm.dynamic_sampling and self.rollout.samples_per_prompt == 1:
            raise ValueError(
                "algorithm.dynamic_sampling=true drops groups of equal rewards, "
                "and rollout.samples_per_prompt=1 makes only such"
            )
        if self.algorithm.dynamic_sampling and self.rollout.temperature == 0:
            raise ValueError(
                "algorithm.dynamic_sampling=true drops groups of equal rewards, "
                "and rollout.temperature=0 draws every sample of a group alike"
            )
        own = self.train.eval_temperature
        if self.train.eval_samples > 1 and 0 in (own, self.rollout.temperature if own < 0 else own):
            raise ValueError(
                f"train.eval_samples={self.train.eval_samples}: at temperature 0 all responses to a prompt are one; "
                "expected 1, or another train.eval_temperature"
            )
        if (
            self.reward.kind in ("exact", "math")
            and not self.data.label_key
            and not self.rollout.function
        ):
            raise ValueError(
                f"reward.kind={self.reward.kind} compares with the label, but data.label_key is empty; expected the "
                "column of the right answers"
            )
        if self.drafter.kind == "eagle3" and self.parallel.pipeline > 1:
            raise ValueError(
                f"parallel.pipeline={self.parallel.pipeline}: drafter.kind=eagle3 reads hidden states of several "
                "layers, which must be on one rank; expected 1"
            )
        if self._unweighted:
            raise ValueError(
                "algorithm.tis_clip=0 leaves out the weights that tokens of an older policy need, which "
                "rollout.staleness=1 and rollout.partial train on; expected more than 0"
            )
        if (
            self.rollout.partial
            and self.rollout.engine == "sglang"
            and self.spec.verifier != "position_keyed"
        ):
            raise ValueError(
                f"rollout.partial={self.rollout.partial}: SGLang continues samples only under "
                f"spec.verifier=position_keyed, not {self.spec.verifier}"
            )
        if self.drafter.overlap and self.rollout.staleness:
            raise ValueError(
                "drafter.overlap=true trains while engines generate, and so does the policy under rollout.staleness=1; "
                "expected one of the two"
            )
        return self

    @property
    def _unweighted(self) -> bool:
        """Return whether the loss takes tokens of an older policy as the present one's own."""
        algorithm, rollout = self.algorithm, self.rollout
        weighs = algorithm.loss == "policy_gradient" and algorithm.old_logprobs == "recompute"
        # mask_offpolicy keeps samples that ended before their group did
        older = rollout.staleness or rollout.partial
        return bool(weighs and algorithm.tis_clip == 0 and older)

    @property
    def second(self) -> int:
        """Return the tensor-parallel size of a second fleet of SGLang engines; 0: there is none."""
        return self.tail.tp[-1] if len(self.tail.tp) > 1 and self.rollout.engine == "sglang" else 0

    @property
    def spare(self) -> int:
        """Return how many positions of the model's context SGLang takes no sample of.

        It keeps one for each token of a round, and takes prompts, and samples that go on, up to six below its end.
        """
        return max(6, 1 + max(self.spec.steps)) if self.rollout.engine == "sglang" else 0

    def generates(self, command: Command) -> bool:
        """Return whether a run of this command has engines: a warm start to evaluate, a replay if one policy stays."""
        if command == "sft":
            return bool(self.sft.eval_every and self.data.eval_path)
        return command == "train" or self.replay.policy_step >= 0

    def check_run(self, command: Command, world_size: int, because: str = "") -> None:
        """Raise ConfigError if a run of this command cannot be started so. Imports nothing heavy.

        because  where the number of ranks comes from, for the message
        """
        source, what = (
            ("sft.path", self.sft.path) if command == "sft" else ("data.path", self.data.path)
        )
        evaluates = self.train.eval_every
        warm = command == "sft"
        alone = warm and self.sft.drafter_only
        parallel, longest = self.parallel, self.model.max_length
        shards = parallel.tensor * parallel.pipeline * parallel.context
        sizes = f"parallel.tensor={parallel.tensor} x pipeline={parallel.pipeline} x context={parallel.context}"
        room = self.train.tokens_per_micro_batch
        rounded = f", in multiples of {parallel.packed} by {sizes}," if parallel.packed > 1 else ""
        run_dir = Path(self.train.run_dir)
        problems = (
            (
                not self.model.path,
                "model.path is empty; expected a Hugging Face directory of policy and MTP tensors; "
                f"`rlspec {command} --help` shows an example",
            ),
            (
                command != "replay" and self.replay.run,
                f"replay.run={self.replay.run} is not an option of this command; expected rlspec replay RUN",
            ),
            (
                not what,
                f"{source} is empty; expected a .jsonl or .parquet file to train on"
                + ("; `rlspec answer` writes one" if command == "sft" else ""),
            ),
            (
                command != "train" and self.train.save_best,
                "train.save_best=true keeps the best policy of `rlspec train`; expected false",
            ),
            (
                command == "train"
                and evaluates not in (0, TrainConfig().eval_every)
                and not self.data.eval_path,
                f"train.eval_every={evaluates}, but data.eval_path is empty",
            ),
            (
                alone and not self.drafter.train,
                "sft.drafter_only=true and drafter.train=false leave nothing to train; expected another of the two",
            ),
            (
                warm and self.sft.held_out and not self.drafter.train,
                f"sft.held_out={self.sft.held_out} measures a drafter that is trained; expected sft.held_out=0, or "
                "drafter.train=true",
            ),
            (
                world_size % shards,
                f"{sizes} needs a multiple of {shards} ranks, but {because or world_size}",
            ),
            (problem := parallel.expert_problem(world_size), problem),
            (
                room // parallel.packed * parallel.packed < longest,
                f"train.tokens_per_micro_batch={room}{rounded} cannot hold one sample of model.max_length={longest}",
            ),
            self._small_cache(),
        )
        for wrong, message in problems:
            if wrong:
                raise ConfigError(message)
        check_writable(run_dir)
        if taken := taken_by(run_dir, self.train.resume):
            raise ConfigError(f"train.run_dir={run_dir}: {taken}")

    def _small_cache(self) -> tuple[bool, str]:
        longest, room = self.model.max_length, self.rollout.max_total_tokens
        wrong = (
            f"rollout.max_total_tokens={room} cannot hold one sample of model.max_length={longest}"
        )
        # its rounds overlap, and it ends an only sample without room for two
        if self.rollout.engine == "sglang":
            rounds = 2 * (1 + max(self.spec.steps)) + 2
            longest += max(6, rounds)
            wrong += f" and what SGLang needs behind it; expected at least {longest}"
        return 0 < room < longest, wrong

    def check_answer(self) -> None:
        """Raise ConfigError if `rlspec answer` cannot be started so."""
        for wrong, message in (
            (
                not self.model.path,
                "model.path is empty; expected a Hugging Face directory; `rlspec answer --help` shows one",
            ),
            (
                not self.data.path,
                "data.path is empty; expected a .jsonl or .parquet file of prompts",
            ),
            (
                not self.answer.path.endswith(".jsonl"),
                f"answer.path={self.answer.path}: expected a .jsonl file to write",
            ),
            self._small_cache(),
        ):
            if wrong:
                raise ConfigError(message)
        check_writable(Path(self.answer.path).parent, "answer.path's directory")


def check_writable(run_dir: Path, option: str = "train.run_dir") -> None:
    """Raise ConfigError if the run cannot write there. A missing directory is made, and removed again."""
    missing = run_dir.absolute()
    try:
        if missing.is_dir():
            if not os.access(missing, os.W_OK | os.X_OK):
                raise ConfigError(
                    f"{option}={run_dir}: not writable; expected a directory that the run can write to"
                )
            return
        while not os.path.lexists(missing.parent):
            missing = missing.parent
        missing.mkdir(exist_ok=True)
        with suppress(OSError):  # another rank's check has made or removed it, or the run has begun
            missing.rmdir()
    except OSError as error:
        raise ConfigError(
            f"{option}={str(run_dir)[:200]}: {error.strerror}; expected a directory that the run can write to"
        ) from None
