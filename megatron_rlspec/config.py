"""The run's configuration: defaults here, a TOML file over them, dotted command-line options over that.

Every option is written once, as a field with its default and its help; `rlspec train --help` is made of these.
Unknown keys, wrong types and contradictions raise `ConfigError`: one line that names the key and the nearest known one.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from megatron_rlspec.types import OFF, SpecConfig

Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]


class ConfigError(ValueError):
    """A user's mistake in the configuration, told in one line."""


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, protected_namespaces=())


class ModelConfig(Section):
    path: str = Field("", description="Hugging Face directory of the policy, with its MTP tensors")
    dtype: Literal["float32", "bfloat16", "float64"] = Field("bfloat16", description="parameter and activation type")
    max_length: Positive = Field(4096, description="longest sample, prompt and response, in tokens")
    moe_router_bias_update_rate: float = Field(0.0, ge=0, description="step of the routers' biases towards balance")
    moe_aux_loss_coeff: float = Field(0.0, ge=0, description="weight of the loss that balances experts; 0: none")


class DataConfig(Section):
    path: str = Field("", description="training prompts: .jsonl or .parquet in slime's format")
    eval_path: str = Field("", description="held-out prompts, same format")
    prompt_key: str = Field("prompt", description="column with the text or the chat messages")
    label_key: str = Field("label", description="column with the answer the reward compares with")
    metadata_key: str = Field("metadata", description="optional column with anything else the reward needs")
    apply_chat_template: bool = Field(False, description="render messages with the tokenizer's chat template")
    shuffle: bool = Field(True, description="reshuffle every epoch, from train.seed")


class RewardConfig(Section):
    kind: str = Field("exact", description="exact, math, module:function, or an http(s) address")
    timeout_seconds: float = Field(10.0, gt=0, description="per sample; a reward that takes longer counts as failed")
    workers: Positive = Field(4, description="rewards computed at the same time")


class RolloutConfig(Section):
    engine: Literal["sglang", "embedded"] = Field("sglang", description="which engine generates")
    urls: tuple[str, ...] = Field(
        (),
        description="attach to these running engines instead of launching; their key: the environment's RLSPEC_API_KEY",
    )
    engines: Positive = Field(1, description="engines to launch when no url is given")
    prompts_per_step: Positive = Field(32, description="prompts of one RL step")
    samples_per_prompt: Positive = Field(8, description="GRPO group size")
    temperature: float = Field(1.0, ge=0, description="sampling temperature of the rollouts")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus; 1 filters nothing")
    top_k: int = Field(-1, description="-1 filters nothing")
    max_new_tokens: Positive = Field(1024, description="longest response")
    max_running_requests: Positive = Field(256, description="decode batch limit of one engine")
    max_total_tokens: Positive = Field(65536, description="KV cache of one engine, in tokens")
    mem_fraction: float = Field(0.7, gt=0, lt=1, description="share of GPU memory for weights and KV cache")
    timeout_seconds: float = Field(1800.0, gt=0, description="a longer silence counts as an engine failure")
    restarts: Count = Field(3, description="times a run starts an engine of its own again that died or fell silent")
    staleness: int = Field(
        0, ge=0, le=1, description="1: the next step's samples are drawn while this one trains, by weights a step older"
    )

    @model_validator(mode="after")
    def _consistent(self) -> RolloutConfig:
        if self.top_k < -1 or self.top_k == 0:
            raise ValueError(f"top_k={self.top_k} leaves no token; expected 1 or more, or -1 to filter nothing")
        if self.urls and self.engines > 1:
            raise ValueError(
                f"engines={self.engines} asks to launch, but urls={','.join(self.urls)} to attach; take one"
            )
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"urls={url}, expected http://HOST:PORT")
        if self.engine == "embedded" and (self.urls or self.engines > 1):
            asked = f"urls={','.join(self.urls)}" if self.urls else f"engines={self.engines}"
            raise ValueError(f"engine=embedded runs once, inside this process, but {asked}")
        return self


class SpecSection(Section):
    mode: Literal["adaptive", "fixed", "off"] = Field("adaptive", description="how the speculative config is chosen")
    num_steps: Count = Field(3, description="drafter passes per round (fixed), or at the start (adaptive)")
    topk: Positive = Field(1, description="mode=fixed, embedded engine: children of a drafted node; 1 drafts a chain")
    num_draft_tokens: Count = Field(0, description="most tokens of a sample that a round verifies; 0: all drafted")
    tree_budget: Literal["none", "sample", "batch"] = Field(
        "none", description="verify what pays: one number a round for every sample, or one for the whole batch"
    )
    candidate_steps: tuple[int, ...] = Field((0, 1, 2, 3, 5), description="what the adaptive policy may choose from")
    verifier: Literal["position_keyed", "target_only", "rejection"] = Field(
        "position_keyed", description="position_keyed: the text does not depend on what was drafted"
    )
    cost_table: str = Field("", description="JSON written by `rlspec profile`; empty: a simple acceptance rule")
    ridge_tokens: float = Field(
        128.0, gt=0, description="without a table: tokens a pass computes while it reads the weights; hardware sets it"
    )
    switching_margin: float = Field(0.01, ge=0, description="a gain of this share that lasts 16 rounds makes a switch")
    probe_share: float = Field(0.01, ge=0, le=0.2, description="bound on probing's share of time")
    catch_up_share: float = Field(
        0.0, ge=0, le=0.2, description="of the time off, what probes may spend besides on the drafter's catching up"
    )

    @model_validator(mode="after")
    def _consistent(self) -> SpecSection:
        if not self.candidate_steps or min(self.candidate_steps) < 0:
            raise ValueError(f"candidate_steps={list(self.candidate_steps)}, expected numbers of steps from 0 on")
        trees = f"topk={self.topk}" if self.topk > 1 else f"tree_budget={self.tree_budget}"
        if self.topk > 1 or self.tree_budget != "none":
            if self.mode != "fixed":
                raise ValueError(f"{trees} is for mode=fixed, but mode={self.mode}")
            if self.verifier == "rejection":
                raise ValueError(f"{trees} is not lossless with verifier=rejection; take position_keyed")
        if self.mode == "fixed":
            self.config()  # refuses numbers that do not fit together
        if self.cost_table and self.mode != "adaptive":
            raise ValueError(f"cost_table={self.cost_table} is what mode=adaptive decides by, but mode={self.mode}")
        if self.mode == "adaptive" and self.num_steps not in self.candidate_steps:
            raise ValueError(f"num_steps={self.num_steps} is not among candidate_steps={list(self.candidate_steps)}")
        return self

    def config(self) -> SpecConfig:
        """What mode=fixed runs, and other modes start with."""
        if self.mode != "fixed" or self.num_steps == 0:
            return OFF
        return SpecConfig(self.num_steps, self.topk, self.num_draft_tokens or -1)


class PushConfig(Section):
    transport: Literal["http", "files", "group"] = Field("http", description="how weights travel to SGLang engines")
    directory: str = Field("/dev/shm", description="of transport=files: seen by the trainer and by every engine")
    address: str = Field("127.0.0.1", description="of transport=group: this machine, as engines reach it")


class HealthConfig(Section):
    on_failure: Literal["plain", "stop"] = Field("plain", description="if a second push does not help: off, or stop")
    canary_prompts: Count = Field(16, description="prompts that every engine answers after a push; 0: no canary")
    canary_tokens: Positive = Field(8, description="longest of these answers")
    canary_share: float = Field(0.02, gt=0, le=1, description="of a run's time; pushes go without a canary beyond it")
    floor_share: float = Field(0.5, gt=0, le=1, description="share of the expected accepted drafts they must reach")
    logprob_gap: float = Field(0.5, gt=0, description="a step is skipped if engine and trainer differ by more nats")


class AlgorithmConfig(Section):
    ratio: Literal["token", "sequence", "cispo"] = Field("token", description="token: GRPO; sequence: GSPO; cispo")
    normalise_std: bool = Field(True, description="divide a group's advantages by its standard deviation")
    clip_low: float = Field(0.2, ge=0, description="lower clip of the ratio is 1 - clip_low")
    clip_high: float = Field(0.28, ge=0, description="upper clip of the ratio is 1 + clip_high")
    dual_clip: float = Field(0.0, ge=0, description="bound on the loss of negative advantages; 0: none, else > 1")
    kl_coef: float = Field(0.0, ge=0, description="weight of the KL to the reference policy")
    kl_kind: Literal["k1", "k2", "k3"] = Field("k3", description="estimator of that KL")
    entropy_coef: float = Field(0.0, description="weight of the entropy bonus")
    aggregation: Literal["token", "sample", "constant"] = Field("token", description="how token losses are averaged")
    old_logprobs: Literal["recompute", "engine"] = Field("recompute", description="denominator of the ratio")
    tis_clip: float = Field(2.0, ge=0, description="cap on the train/engine importance weight; 0: none")
    stale_clip: float = Field(2.0, gt=0, description="cap on that weight for tokens drawn by an older policy")
    dynamic_sampling: bool = Field(False, description="drop groups whose rewards are all equal, and refill")
    overlong_tokens: Count = Field(0, description="length of the soft penalty zone before max_new_tokens; 0: none")

    @model_validator(mode="after")
    def _consistent(self) -> AlgorithmConfig:
        if 0 < self.dual_clip <= 1:
            raise ValueError(f"dual_clip={self.dual_clip} must be above 1, or 0 for none")
        if self.dual_clip and self.ratio == "cispo":
            raise ValueError(f"dual_clip={self.dual_clip} bounds a clipped loss, but ratio=cispo does not clip it")
        return self


class OptimizerConfig(Section):
    lr: float = Field(1e-6, gt=0, description="learning rate of the policy")
    warmup_steps: Count = Field(0, description="linear warm-up")
    decay_steps: Count = Field(0, description="linear decay to a tenth over so many steps, drafter too; 0: none")
    weight_decay: float = Field(0.0, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    clip_grad: float = Field(1.0, ge=0, description="global gradient norm; 0: none")
    distributed: bool = Field(False, description="Megatron's distributed optimizer (ZeRO-1)")

    @model_validator(mode="after")
    def _consistent(self) -> OptimizerConfig:
        if 0 < self.decay_steps < self.warmup_steps:
            raise ValueError(f"decay_steps={self.decay_steps} end before warmup_steps={self.warmup_steps} do")
        return self


class DrafterConfig(Section):
    train: bool = Field(True, description="co-train the drafter with the policy")
    depth: Positive = Field(3, description="unrolled drafter steps trained")
    repeated_layer: bool = Field(True, description="one MTP layer unrolled exactly as the engine drafts")
    mtp_detach_heads: bool = Field(True, description="false: classic joint training, which moves the policy")
    loss: Literal["ce", "forward_kl", "reverse_kl", "tv"] = Field("ce", description="training objective")
    depth_decay: float = Field(0.8, gt=0, le=1, description="weight of depth d is depth_decay ** (d - 1)")
    lr: float = Field(1e-4, gt=0, description="learning rate of the drafter")
    weight_decay: float = Field(0.0, ge=0)
    clip_grad: float = Field(1.0, ge=0, description="its own gradient norm; 0: none")


class ParallelConfig(Section):
    tensor: Positive = Field(1, description="tensor parallel size")
    pipeline: Positive = Field(1, description="pipeline parallel size")
    context: Positive = Field(1, description="context parallel size")
    expert: Positive = Field(1, description="expert parallel size")
    sequence: bool = Field(False, description="sequence parallelism along the tensor parallel ranks")
    recompute: bool = Field(False, description="recompute every layer in the backward pass")

    @model_validator(mode="after")
    def _consistent(self) -> ParallelConfig:
        if self.sequence and self.tensor == 1:
            raise ValueError("sequence=true needs tensor > 1, but tensor=1")
        return self


class TrainConfig(Section):
    steps: Positive = Field(100, description="RL steps")
    tokens_per_micro_batch: Positive = Field(8192, description="packing budget of one data-parallel rank")
    seed: int = Field(1, description="of data order, sampling and initialisation")
    run_dir: str = Field("runs/run", description="everything the run writes")
    save_every: Count = Field(0, description="steps between checkpoints; 0: only at the end")
    keep: Positive = Field(2, description="checkpoints kept")
    resume: bool = Field(False, description="continue from the newest checkpoint in run_dir")
    eval_every: Count = Field(0, description="steps between evaluations; 0: first and last only")
    eval_prompts: Positive = Field(128, description="held-out prompts of one evaluation")
    max_bad_steps: Count = Field(3, description="stop after so many steps in a row with a non-finite loss")


class SftConfig(Section):
    path: str = Field("", description="rows of prompt and response, .jsonl or .parquet")
    response_key: str = Field("response", description="column with the written answer")
    steps: Positive = Field(1000, description="most steps")
    samples_per_step: Positive = Field(128, description="rows of one step")
    drafter_only: bool = Field(False, description="leave the policy as it is")
    eval_every: Count = Field(0, description="steps between evaluations on data.eval_path by a real engine; 0: none")
    eval_prompts: Positive = Field(64, description="held-out prompts of one evaluation")
    stop_reward: float = Field(1.0, description="stop once held-out reward is above this and accept length is flat")
    plateau: float = Field(0.1, gt=0, description="accept length is flat if an evaluation gains less than this")


class Config(Section):
    """One run. Sections are independent of each other, but for the cross-checks below."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    spec: SpecSection = SpecSection()
    push: PushConfig = PushConfig()
    health: HealthConfig = HealthConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    drafter: DrafterConfig = DrafterConfig()
    parallel: ParallelConfig = ParallelConfig()
    sft: SftConfig = SftConfig()
    train: TrainConfig = TrainConfig()

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        if self.rollout.engine != "embedded" and (self.spec.topk > 1 or self.spec.tree_budget != "none"):
            asked = f"spec.topk={self.spec.topk}" if self.spec.topk > 1 else f"spec.tree_budget={self.spec.tree_budget}"
            raise ValueError(f"{asked} needs rollout.engine=embedded, but rollout.engine={self.rollout.engine}")
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
        if self.sft.drafter_only and not self.drafter.train:
            raise ValueError("sft.drafter_only=true and drafter.train=false leave nothing to train")
        if self.sft.drafter_only and not self.drafter.mtp_detach_heads:
            raise ValueError(
                "sft.drafter_only=true freezes the policy, but drafter.mtp_detach_heads=false trains it too"
            )
        return self

    def check_run(self, command: Literal["train", "sft"], world_size: int, because: str = "") -> None:
        """What a run of this command needs beyond a consistent file. Raises ConfigError; nothing heavy is imported.

        `because` says where the number of ranks is from, in the words of a refusal.
        """
        source, what = ("data.path", self.data.path) if command == "train" else ("sft.path", self.sft.path)
        evaluates = self.train.eval_every if command == "train" else self.sft.eval_every
        parallel, longest = self.parallel, self.model.max_length
        shards = parallel.tensor * parallel.pipeline * parallel.context
        sizes = f"parallel.tensor={parallel.tensor} x pipeline={parallel.pipeline} x context={parallel.context}"
        spoilt = "hf/ is there already, the result of an ended run; take another directory"
        run_dir = Path(self.train.run_dir)
        problems = (
            (not self.model.path, "model.path is empty; expected a Hugging Face directory of policy and MTP tensors"),
            (not what, f"{source} is empty; expected a .jsonl or .parquet file to train on"),
            (
                evaluates and not self.data.eval_path,
                f"{'train' if command == 'train' else 'sft'}.eval_every={evaluates}, but data.eval_path is empty",
            ),
            (world_size % shards, f"{sizes} needs a multiple of {shards} ranks, but {because or world_size}"),
            (
                self.train.tokens_per_micro_batch < longest,
                f"train.tokens_per_micro_batch={self.train.tokens_per_micro_batch} cannot hold one sample of "
                f"model.max_length={longest}",
            ),
            (
                self.rollout.max_total_tokens < longest,
                f"rollout.max_total_tokens={self.rollout.max_total_tokens} cannot hold one sample of "
                f"model.max_length={longest}",
            ),
            (run_dir.exists() and not run_dir.is_dir(), f"train.run_dir={run_dir}: a file; expected a directory"),
            ((run_dir / "hf").exists(), f"train.run_dir={run_dir}: {spoilt}"),
        )
        for wrong, message in problems:
            if wrong:
                raise ConfigError(message)


def load(path: str | Path | None = None, overrides: Mapping[str, str] | None = None) -> Config:
    """Defaults, then the TOML file, then overrides like `{"optimizer.lr": "1e-5"}`."""
    tree: dict[str, Any] = {}
    if path is not None:
        try:
            tree = tomllib.loads(Path(path).read_text())
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from None
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path}: not valid TOML: {error}") from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: not valid TOML: not UTF-8 at byte {error.start}") from None
    for dotted, value in (overrides or {}).items():
        section, _, key = dotted.partition(".")
        table = tree.setdefault(section, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {section} is {table!r}, expected a table [{section}]")
        table[key] = _list_or_scalar(value, section, key)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_one_line(error, path)) from None


def options() -> Iterator[tuple[str, Any, Any, str]]:
    """(dotted name, annotation, default, help) of every option, in order: what `--help` shows."""
    for section, outer in Config.model_fields.items():
        for key, inner in type(outer.default).model_fields.items():
            yield f"{section}.{key}", inner.annotation, inner.default, inner.description or ""


def _list_or_scalar(value: str, section: str, key: str) -> Any:
    default = getattr(getattr(Config(), section, None), key, None)
    if isinstance(default, tuple):
        return [part for part in value.split(",") if part]
    return value


def _one_line(error: ValidationError, path: str | Path | None) -> str:
    first = error.errors(include_url=False)[0]
    dotted = ".".join(str(part) for part in first["loc"] if not isinstance(part, int))
    where = f"{path}: " if path else ""
    if first["type"] == "extra_forbidden":
        known = [name for name, *_ in options()] + list(Config.model_fields)
        near = difflib.get_close_matches(dotted, known, n=1, cutoff=0.5)
        return f"{where}unknown option {dotted}" + (f"; did you mean {near[0]}?" if near else "")
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "model_type":
        message = f"expected a table [{dotted}]"
    got = "" if first["type"] == "value_error" else f" (got {first['input']!r})"
    return f"{where}{dotted}: {message}{got}" if dotted else f"{where}{message}"
