"""The whole configuration of a run, and the checks between its sections.

A check of one section stands in that section. `_consistent` here has checks that hold for every command; `check_run`
and `check_answer` have those that depend on the command and on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import model_validator

from megatron_rlspec.config.algorithm import AlgorithmConfig
from megatron_rlspec.config.base import ConfigError, Section
from megatron_rlspec.config.commands import AnswerConfig, ReplayConfig, SftConfig
from megatron_rlspec.config.data import DataConfig
from megatron_rlspec.config.drafter import DrafterConfig
from megatron_rlspec.config.log import LogConfig
from megatron_rlspec.config.machine import ParallelConfig, PlacementConfig, PushConfig
from megatron_rlspec.config.model import ModelConfig
from megatron_rlspec.config.reward import RewardConfig
from megatron_rlspec.config.rollout import RolloutConfig
from megatron_rlspec.config.spec import SpecSection
from megatron_rlspec.config.tail import TailConfig
from megatron_rlspec.config.training import HealthConfig, OptimizerConfig, TrainConfig

Command = Literal["train", "sft", "replay"]


class Config(Section):
    """All options of a run, by section.

    It is frozen. A copy by `model_copy` is not checked, and its changed options count as set by the user.
    """

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
        # Messages begin with the option, which `load` looks for to name the file (`load._located`).
        coupled = self.keyed and self.spec.drafts == "coupled"
        if self.spec.ragged and self.rollout.engine == "sglang" and not coupled:
            raise ValueError(
                "spec.ragged=true with rollout.engine=sglang needs spec.verifier=position_keyed and spec.drafts=coupled"
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
        temperature = self.train.eval_temperature
        if temperature < 0:
            temperature = self.rollout.temperature
        if self.train.eval_samples > 1 and temperature == 0:
            raise ValueError(
                f"train.eval_samples={self.train.eval_samples}: at temperature 0 all responses to a prompt are one; "
                "expected 1, or another train.eval_temperature"
            )
        labelled = self.data.label_key or self.rollout.function
        if self.reward.kind in ("exact", "math") and not labelled:
            raise ValueError(
                f"reward.kind={self.reward.kind} compares with the label, but data.label_key is empty; expected the "
                "column of the right answers"
            )
        if self._unweighted:
            raise ValueError(
                "algorithm.tis_clip=0 leaves out the weights that tokens of an older policy need, which "
                "rollout.staleness=1 and rollout.partial train on; expected more than 0"
            )
        if self.rollout.partial and self.rollout.engine == "sglang" and not self.keyed:
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
        """Return whether tokens of an older policy would enter the loss without an importance weight."""
        algorithm, rollout = self.algorithm, self.rollout
        # a user's loss weighs as it likes; with old_logprobs=engine the ratio itself is the weight
        weighs = algorithm.loss == "policy_gradient" and algorithm.old_logprobs == "recompute"
        # also with mask_offpolicy: it masks only continued samples, and a whole sample may be of an older policy
        older = rollout.staleness or rollout.partial
        return bool(weighs and algorithm.tis_clip == 0 and older)

    @property
    def reserved_positions(self) -> int:
        """Return how many positions at the end of an engine's context cannot hold tokens of a sample.

        SGLang reserves one position for each token of a round (1 + drafts), and refuses prompts that end less than six
        positions before the end of the context. The embedded engine fills all positions: 0.
        """
        return max(6, 1 + max(self.spec.steps)) if self.rollout.engine == "sglang" else 0

    @property
    def keyed(self) -> bool:
        """Return whether the noise of a token depends on seed and position only.

        Then another engine can continue a sample, with the same tokens.
        """
        return self.spec.verifier == "position_keyed"

    @property
    def longest_prompt(self) -> int:
        """Return the most tokens of a prompt: max_length less max_new_tokens, so that every response has room."""
        return self.model.max_length - self.rollout.max_new_tokens

    def generates(self, command: Command) -> bool:
        """Return whether a run of this command needs engines.

        A warm start needs them for evaluations, and a replay if it keeps one policy and generates from it.
        """
        if command == "sft":
            return bool(self.sft.eval_every and self.data.eval_path)
        return command == "train" or self.replay.policy_step >= 0

    def check_run(self, command: Command, world_size: int, ranks_origin: str = "") -> None:
        """Raise ConfigError if a run of this command cannot start with these options on `world_size` ranks.

        world_size    trainer ranks of the job
        ranks_origin  says in the message where the number of ranks comes from, such as "--ranks is 3"; "": the message
                      has the number
        """
        for problem in self._problems(command, world_size, ranks_origin):
            raise ConfigError(problem)

    def _problems(self, command: Command, world_size: int, ranks_origin: str) -> Iterator[str]:
        """Yield a line for every option with which `check_run` refuses the run, the most basic ones first."""
        if not self.model.path:
            yield (
                "model.path is empty; expected a Hugging Face directory of policy and MTP tensors; "
                f"`rlspec {command} --help` shows an example"
            )
        if command != "replay" and self.replay.run:
            yield f"replay.run={self.replay.run} is not an option of this command; expected rlspec replay RUN"
        if command == "sft" and not self.sft.path:
            yield "sft.path is empty; expected a .jsonl or .parquet file to train on; `rlspec answer` writes one"
        if command != "sft" and not self.data.path:
            yield "data.path is empty; expected a .jsonl or .parquet file to train on"
        if command != "train" and self.train.save_best:
            yield "train.save_best=true keeps the best policy of `rlspec train`; expected false"
        # the default says nothing: it is no mistake without data.eval_path
        evaluates = self.train.eval_every not in (0, TrainConfig().eval_every)
        if command == "train" and evaluates and not self.data.eval_path:
            yield f"train.eval_every={self.train.eval_every}, but data.eval_path is empty; expected a file, or 0"
        if command == "train":
            yield from self._problems_of_groups()
            prompts = self.rollout.prompts_per_step
            if prompts % self.train.updates_per_rollout:
                yield (
                    f"train.updates_per_rollout={self.train.updates_per_rollout} does not divide "
                    f"rollout.prompts_per_step={prompts} into equal mini-batches"
                )
        if command == "sft" and not self.drafter.train:
            if self.sft.drafter_only:
                yield "sft.drafter_only=true and drafter.train=false leave nothing to train"
            if self.sft.held_out:
                yield (
                    f"sft.held_out={self.sft.held_out} measures a drafter that is trained; expected sft.held_out=0, or "
                    "drafter.train=true"
                )
        yield from self._problems_of_layout(world_size, ranks_origin)
        yield from self._problems_of_tail(world_size, ranks_origin)

    def _problems_of_groups(self) -> Iterator[str]:
        """Yield options with which all samples of a group get the same reward, so that no advantage remains."""
        algorithm = self.algorithm
        # a user's advantage may need no differences; dynamic sampling drops groups of equal rewards in any case
        if algorithm.advantage != "group" and not algorithm.dynamic_sampling:
            return
        rollout = self.rollout
        equal = "gives no advantage: a sample is compared with the others of its prompt"
        if rollout.samples_per_prompt == 1:
            yield f"rollout.samples_per_prompt=1 {equal}; expected at least 2"
        if rollout.temperature == 0 and not rollout.function:
            yield f"rollout.temperature=0 {equal}, which are all the same text; expected more than 0"

    def _problems_of_layout(self, world_size: int, ranks_origin: str) -> Iterator[str]:
        """Yield parallel sizes that do not divide the ranks, and sizes that cannot hold one sample."""
        parallel = self.parallel
        shards = parallel.tensor * parallel.pipeline * parallel.context
        sizes = f"parallel.tensor={parallel.tensor} x pipeline={parallel.pipeline} x context={parallel.context}"
        if world_size % shards:
            yield f"{sizes} needs a multiple of {shards} ranks, but {ranks_origin or world_size}"
        if problem := parallel.expert_problem(world_size):
            yield problem
        room = self.train.tokens_per_micro_batch
        longest = self.model.max_length
        # `packing/pack.py` uses micro-batches of the largest multiple that fits
        multiple = parallel.pack_multiple
        if room // multiple * multiple < longest:
            rounded = f", in multiples of {multiple} by {sizes}," if multiple > 1 else ""
            yield f"train.tokens_per_micro_batch={room}{rounded} cannot hold one sample of model.max_length={longest}"
        yield from self._small_cache()

    def _problems_of_tail(self, world_size: int, ranks_origin: str) -> Iterator[str]:
        """Yield options that moves of samples and changes of tensor-parallel size (`extensions/migration/`) forbid."""
        tail = self.tail
        sizes = ",".join(map(str, tail.tp))
        option = ""
        if tail.rebalance:
            option = "tail.rebalance=true"
        elif tail.tp != (1,):
            option = f"tail.tp={sizes}"
        if option and self.spec.mode != "off" and not self.keyed:
            yield f"{option} continues samples, which needs spec.verifier=position_keyed"
        if tail.rebalance and self.rollout.function:
            yield f"{option} does not move the conversations of rollout.function; expected false"
        if tail.rebalance and self.rollout.engine == "embedded" and world_size == 1:
            yield (
                f"{option} moves samples between engines, and rollout.engine=embedded runs one on each rank; "
                "expected several ranks, or false"
            )
        if tail.tp != (1,) and not tail.cost_table:
            measure = f"python benchmarks/round_costs.py FILE --model DIR --tp {sizes}"
            yield f"tail.tp={sizes} needs tail.cost_table; `{measure}` writes it"
        if world_size % tail.tp[-1]:
            yield f"tail.tp={sizes} needs a multiple of {tail.tp[-1]} ranks, but {ranks_origin or world_size}"

    def _small_cache(self) -> Iterator[str]:
        """Yield a line if rollout.max_total_tokens is too small for one sample; 0 leaves the size to the engine."""
        longest = self.model.max_length
        room = self.rollout.max_total_tokens
        needed = longest
        reason = ""
        if self.rollout.engine == "sglang":
            # Its overlap scheduler prepares the next round while one runs, so a sample needs room for two rounds. It
            # ends a sample that runs alone without this room.
            needed += max(6, 2 * (1 + max(self.spec.steps)) + 2)
            reason = f" and what SGLang needs behind it; expected at least {needed}"
        if 0 < room < needed:
            yield f"rollout.max_total_tokens={room} cannot hold one sample of model.max_length={longest}{reason}"

    def check_answer(self) -> None:
        """Raise ConfigError if `rlspec answer` cannot start with these options."""
        if not self.model.path:
            raise ConfigError(
                "model.path is empty; expected a Hugging Face directory; `rlspec answer --help` shows one"
            )
        if not self.data.path:
            raise ConfigError("data.path is empty; expected a .jsonl or .parquet file of prompts")
        if not self.answer.path.endswith(".jsonl"):
            raise ConfigError(f"answer.path={self.answer.path}: expected a .jsonl file to write")
        for problem in self._small_cache():
            raise ConfigError(problem)
