"""Run one part of `gpu_smoke.py` on this machine: python gpu_parts.py PART FOLDER OUT

FOLDER holds plan.json, and the model if `model` has run. Each figure is a line of OUT as soon as it is measured, so a
part that is killed loses none. Running out of GPU memory is a figure, too.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from bigram_model import checkpoint
from gpu_smoke import Plan, captures, from_json

SHARPNESS, PROMPT = 16.0, 8
RIDGE = 256.0  # tokens in a pass from which an H100 computes longer than it reads weights; only without a cost table
_GIB = 1 << 30
IPC = (
    "SGLang's update_weights_from_tensor takes pickles by HTTP, so `rlspec serve` has no such transport. slime pushes "
    "by CUDA IPC with --colocate: run examples/slime/mimo-7b-rl.sh and read perf/update_weights_time"
)


class Figures:
    """Writes what is measured, a line each, at once."""

    def __init__(self, out: Path) -> None:
        self.out = out

    def say(self, what: str, value: float, unit: str = "", note: str = "", estimate: Sequence[Any] = ()) -> None:
        """Write a figure. `estimate`: (low, high, because), if it depends on the plan."""
        self._write(what=what, state="measured", value=float(value), unit=unit, note=note, estimate=list(estimate))

    def without(self, what: str, state: str, note: str) -> None:
        """Write why there is no figure."""
        self._write(what=what, state=state, value=None, unit="", note=note, estimate=[])

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Go on after this figure if there is not enough memory for it or if it fails, and say so."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            self.without(f"{what}: peak", "out of memory", str(error).splitlines()[0][:200])
        except (RuntimeError, ValueError) as error:  # an engine's errors, NCCL's and CUDA's are RuntimeErrors
            self.without(what, "failed", f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}")
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _write(self, **row: Any) -> None:
        with self.out.open("a") as out:
            out.write(json.dumps(row) + "\n")


# ---- measuring ------------------------------------------------------------------------------------------------------


def wait() -> None:
    """Wait until the GPU has done what was asked."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def forget_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak_gib() -> float | None:
    """Return the most memory that tensors took since `forget_peak`; None on a CPU."""
    return torch.cuda.max_memory_allocated() / _GIB if torch.cuda.is_available() else None


def timed(work: Callable[[], Any]) -> float:
    """Measure milliseconds of one call, the GPU's work included."""
    wait()
    began = time.perf_counter()
    work()
    wait()
    return 1000 * (time.perf_counter() - began)


def say_peak(figures: Figures, what: str, peak: float | None, note: str = "", estimate: Sequence[Any] = ()) -> None:
    if peak is None:
        figures.without(f"{what}: peak", "not on a CPU", note)
    else:
        figures.say(f"{what}: peak", peak, "GiB", note, estimate)


# ---- parts ----------------------------------------------------------------------------------------------------------


def model(plan: Plan, folder: Path, figures: Figures) -> None:
    """Write a random model whose drafter is nearly right by construction (bigram_model.py)."""
    from megatron_rlspec.weights.checkpoint import write_hf

    shape = plan.shape
    dtype = getattr(torch, plan.dtype)
    began = time.perf_counter()
    config, tensors = checkpoint(
        SHARPNESS,
        shape.layers,
        shape.hidden,
        vocab=shape.vocab,
        heads=shape.heads,
        kv=shape.groups,
        ffn=shape.ffn,
        dtype=dtype,
        device=plan.device,
    )
    write_hf(folder / "model", config, tensors)
    size = sum(tensor.nbytes for tensor in tensors.values())
    figures.say("size of the model", size / 1e9, "GB", f"{shape.layers} layers of {shape.hidden}")
    figures.say("making and writing it", time.perf_counter() - began, "s")


def serve_options(plan: Plan, requests: int, memory: float) -> list[str]:
    """Return options of an engine. `memory`: share of the memory that is free when it starts; the rest stays free."""
    options = ["--device", plan.device, "--dtype", plan.dtype, "--max-running-requests", str(requests)]
    options += ["--max-total-tokens", str(plan.pool_tokens), "--disable-radix-cache", "--log-level", "info"]
    options += plan.engine
    return options if plan.device == "cpu" else [*options, "--mem-fraction-static", str(memory)]


def decode(plan: Plan, folder: Path, figures: Figures) -> None:
    """Compare contestants on one speculating engine with a second engine that was launched without speculation."""
    from adaptive_sglang import share_a_key

    from megatron_rlspec.rollout.sglang.client.launcher import launch

    share_a_key()
    steps = ",".join(map(str, plan.steps))
    adaptive = ["--spec", "adaptive", "--candidate-steps", steps, "--num-steps", str(max(plan.fixed))]
    most = max(plan.batches)
    log = folder / "speculating.log"
    with launch(folder / "model", log, arguments=[*serve_options(plan, most, 0.45), *adaptive]) as first:
        began = time.perf_counter()
        first.wait()
        figures.say("speculating engine answers after", time.perf_counter() - began, "s")
        graphs, seconds, gigabytes = captures(log.read_text(errors="replace"))
        figures.say("graphs captured", graphs, "", f"candidates {steps}; up to batch {most}")
        figures.say("capturing graphs", seconds, "s")
        figures.say("memory of graphs", gigabytes, "GB")
        plain = [*serve_options(plan, most, 0.75), "--spec", "off"]
        with launch(folder / "model", folder / "plain.log", arguments=plain) as second:
            began = time.perf_counter()
            second.wait()
            figures.say("plain engine answers after", time.perf_counter() - began, "s")
            _compete(plan, folder, figures, first, second)


def _compete(plan: Plan, folder: Path, figures: Figures, speculating: Any, plain: Any) -> None:
    """Run all contestants in turn, and say tokens/s and ratios to plain within the same repetition."""
    from adaptive_sglang import ratio, shares, tokens_per_round

    from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
    from megatron_rlspec.speculation.adapt import Adapter
    from megatron_rlspec.speculation.roofline import Roofline
    from megatron_rlspec.types import OFF, SpecConfig, SpecSchedule

    spec = SGLangEngine.of(speculating, timeout=120)
    engines = {"plain": SGLangEngine.of(plain, timeout=120)}
    fixed = {"off": OFF} | {f"k{k}": SpecConfig(k) for k in plan.fixed}
    names = ("plain", *fixed, "adaptive")
    cost = Roofline.of_layers(plan.shape.layers, ridge_tokens=RIDGE)
    adapter = Adapter(plan.steps, _cost_table(plan, folder, figures, spec), cost, 0.01, 0.01, learn=False)
    for batch in plan.batches:
        seconds: dict[str, list[float]] = {name: [] for name in names}
        rounds: dict[str, list[Any]] = {name: [] for name in names}
        equal = []
        for repetition in range(-1, plan.repetitions):
            turn = max(repetition, 0) % len(names)
            texts = {}
            for name in (*names[turn:], *names[:turn]):
                if name == "adaptive":
                    spec.set_spec_rule(adapter.rule())
                elif name in fixed:
                    spec.set_schedule(SpecSchedule.fixed(fixed[name]))
                engine = engines.get(name, spec)
                engine.stats()
                spec.spec_rule_report()
                taken, texts[name] = _rollout(plan, engine, batch, 1000 * batch + repetition + 1)
                stats = engine.stats()
                if name == "adaptive":
                    adapter.observe(stats, [spec.spec_rule_report()])
                if repetition >= 0:
                    seconds[name].append(taken)
                    rounds[name] += stats
            equal += [np.mean([texts[name][i] == texts["plain"][i] for i in range(batch)]) for name in names[1:]]
        for name in names:
            speed = batch * plan.tokens / statistics.median(seconds[name])
            per_round = "" if name == "plain" else f"{tokens_per_round(rounds[name]):.2f} tokens a round; "
            chosen = "" if name == "plain" else f"rounds: {shares(rounds[name])}"
            figures.say(f"{name}, batch {batch}", speed, "tokens/s", per_round + chosen)
        for name in names[1:]:
            middle, low, high = ratio(np.array(seconds["plain"]), np.array(seconds[name]))
            note = f"{low:.3f} to {high:.3f} over {plan.repetitions} repetitions"
            figures.say(f"{name} / plain, batch {batch}", middle, "x", note)
        note = "1 in float32; bf16 kernels differ between decode and verify"
        figures.say(f"texts equal to plain's, batch {batch}", float(np.mean(equal)), "", note)


def _cost_table(plan: Plan, folder: Path, figures: Figures, engine: Any) -> str:
    """Profile the engine for the adaptive contestant, and say what rounds cost; "" if the plan has no time for it."""
    from megatron_rlspec.rollout import profile
    from megatron_rlspec.speculation.cost_table import CostTable
    from megatron_rlspec.types import OFF, SpecConfig

    if not plan.profile_seconds:
        return ""
    path = folder / "table.json"
    points = ",".join(map(str, sorted({1, *plan.batches})))
    steps = ",".join(map(str, plan.steps))
    command = [str(path), "--url", engine.url, "--model", str(folder / "model"), "--samples", "8"]
    command += ["--batches", points, "--lengths", "64", "--steps", steps, "--seconds", str(plan.profile_seconds)]
    if profile.main(command):
        figures.without("cost table", "failed", "rlspec profile; the adaptive rule goes by a roofline")
        return ""
    table = CostTable.load(path)
    for batch in plan.batches:
        for config in (OFF, SpecConfig(max(plan.fixed))):
            figures.say(f"a round, {config}, batch {batch}", table.ms(config, batch, 64 * batch), "ms")
    return str(path)


def _rollout(plan: Plan, engine: Any, batch: int, seed: int) -> tuple[float, list[list[int]]]:
    from megatron_rlspec.types import Prompt, Request, Sampling

    draw = np.random.default_rng(seed)
    prompts = draw.integers(3, plan.shape.vocab, (batch, PROMPT))
    asked = [Request(f"{i:06d}.", Prompt(i, prompts[i]), seed=1000 * seed + i) for i in range(batch)]
    began = time.perf_counter()
    samples = engine.generate(asked, Sampling(max_new_tokens=plan.tokens, ignore_eos=True))
    seconds = time.perf_counter() - began
    return seconds, [sample.tokens.tolist() for sample in samples]


def push(plan: Plan, folder: Path, figures: Figures) -> None:
    """Push policy and drafter, held on this GPU, into one engine on the same GPU, by each transport in turn."""
    import torch.distributed as dist

    from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
    from megatron_rlspec.rollout.sglang.client.launcher import launch
    from megatron_rlspec.rollout.sglang.client.transport import Files, GroupBroadcast, Http
    from megatron_rlspec.weights.checkpoint import read_hf
    from megatron_rlspec.weights.push import Pusher

    found = read_hf(folder / "model")[1]
    tensors = {name: found[name].to(plan.device) for name in found}
    size = sum(tensor.nbytes for tensor in tensors.values())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    options = [*serve_options(plan, 4, 0.6), "--spec", "fixed", "--num-steps", "1"]
    shared = _roomy("/dev/shm", 1 << 30) or str(folder)
    room = Path(shared, folder.name)  # gpu_smoke.py removes it
    room.mkdir()
    with launch(folder / "model", folder / "pushed.log", arguments=options) as process:
        process.wait()
        ways = {"http": Http(), "files": Files(room), "group over gloo": GroupBroadcast(backend="gloo")}
        version = 0
        for name, way in ways.items():
            with figures.attempt(name):
                engine = SGLangEngine.of(process, timeout=240, transport=way)
                reports = []
                for _ in range(plan.push_rounds):
                    version += 1
                    reports.append(Pusher({"engine": engine}).push(version, lambda scope: tensors.items()))
                    if reports[-1].failed:
                        raise RuntimeError(reports[-1].failed["engine"])
                seconds = statistics.median(report.seconds for report in reports)
                note = f"{size / 1e9:.2f} GB, fingerprints and comparison included"
                figures.say(name, size / seconds / 1e9, "GB/s", note if name != "files" else f"{note}; in {shared}")
                figures.say(f"{name}: a push", seconds, "s")
                checks = statistics.median(report.verify_seconds for report in reports)
                figures.say(f"{name}: comparison in the engine", checks, "s")
    if plan.device == "cuda":
        figures.without("group over NCCL", "not on one card", "NCCL refuses two ranks on one GPU; docs/gpu.md has it")
    figures.without("CUDA IPC", "inside slime only", IPC)


def _roomy(directory: str, needed: int) -> str:
    about = os.statvfs(directory)
    return directory if about.f_bavail * about.f_frsize > needed else ""


def train(plan: Plan, folder: Path, figures: Figures) -> None:
    """Take three steps with and without the drafter, on one rank, and follow the rounds of one long response."""
    from megatron_rlspec import environment
    from megatron_rlspec.mtp.predict import walk
    from megatron_rlspec.train.step import Trainer

    environment.prepare(os.environ)
    shape = _train_shape(plan)
    configs = _train_configs(plan)
    expected = _static_gib(folder)
    batches = _batches(plan, shape["vocab_size"])
    milliseconds = {}
    for name, config in configs.items():
        forget_peak()
        with figures.attempt(name):
            trainer = Trainer(config, shape)
            taken = [timed(lambda: trainer.train_step(batches, objective="grpo")) for _ in range(4)]  # noqa: B023
            milliseconds[name] = statistics.median(taken[1:])
            note = f"{plan.train_layers} layers, {plan.train_sequences} samples of {plan.train_length}"
            figures.say(f"{name}: a step", milliseconds[name], "ms", f"{note}; the first took {taken[0]:.0f}")
            why = "--dry-run: weights, gradients, optimizer, activations"
            say_peak(figures, name, peak_gib(), "workspaces come on top", (expected[name], expected[name], why))
        trainer = None
        gc.collect()
    if len(milliseconds) == 2:
        both, alone = milliseconds.values()
        figures.say("drafter's share of a step", (both - alone) / both, "", "difference of the two medians")
    rows = 8192 if plan.device == "cuda" else 64
    accept, mask = torch.rand(rows, 3, device=plan.device), torch.ones(rows, 3, device=plan.device)
    took = statistics.median(timed(lambda: walk(accept, accept, mask, (1, 2, 3))) for _ in range(plan.repeats))
    was = (220, 220, "measured on a busy CPU, by a loop on the host") if rows == 8192 else ()
    figures.say(f"predicting acceptance, one response of {rows}", took, "ms", "in each micro-batch, on the device", was)


def _train_configs(plan: Plan) -> dict[str, Any]:
    from megatron_rlspec.config import Config

    configs = {}
    for name, trained in (("policy and drafter", True), ("policy alone", False)):
        settings = {
            "model": {"dtype": plan.dtype, "max_length": plan.train_length},
            "drafter": {"depth": plan.train_depth, "train": trained},
            "train": {"tokens_per_micro_batch": plan.train_sequences * plan.train_length},
            "rollout": {"max_new_tokens": plan.train_length // 2},
        }
        configs[name] = Config.model_validate(settings)
    return configs


def _static_gib(folder: Path) -> dict[str, float]:
    """Return what `--dry-run` says of each configuration, computed in a process that sees no GPU, as it needs."""
    command = [sys.executable, __file__, "dry_run", str(folder), str(folder / "static.json")]
    subprocess.run(command, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, check=True)
    return json.loads((folder / "static.json").read_text())


def dry_run(plan: Plan, folder: Path, figures: Figures) -> None:
    """Write the memory of each configuration of `train` to `figures.out`, in GiB."""
    from megatron_rlspec.train import dry_run

    shape = _train_shape(plan)
    static = {}
    for name, config in _train_configs(plan).items():
        built = dry_run.stages(config, shape, 1, activations=True)
        static[name] = dry_run.memory(config, shape, built, 0, 1).total / _GIB
    figures.out.write_text(json.dumps(static))


def _train_shape(plan: Plan) -> dict[str, Any]:
    shape = plan.shape
    return {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": shape.hidden,
        "num_hidden_layers": plan.train_layers,
        "intermediate_size": shape.ffn,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.groups,
        "head_dim": shape.hidden // shape.heads,
        "attention_bias": True,
        "hidden_act": "silu",
        "vocab_size": shape.vocab,
        "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 1,
        "initializer_range": 0.02,
    }


def _batches(plan: Plan, vocab: int) -> list[Any]:
    from megatron_rlspec.packing.pack import pack
    from megatron_rlspec.types import Prompt, Sample

    draw = np.random.default_rng(0)
    length = plan.train_length
    mask = (np.arange(length) >= length // 4).astype(np.float32)
    samples = []
    for i in range(plan.train_sequences):
        tokens = draw.integers(0, vocab, length)
        behaviour = np.where(mask, -np.log(vocab), 0).astype(np.float32)
        samples.append(Sample(str(i), Prompt(i, tokens[: length // 4]), tokens, mask, behaviour))
    advantages = [1.0 if i % 2 else -1.0 for i in range(len(samples))]
    return pack(samples, depth=plan.train_depth, tokens_per_micro_batch=length * len(samples), advantages=advantages)


def attention(plan: Plan, folder: Path, figures: Figures) -> None:
    """Run the drafter's attention on one sequence, forward and backward."""
    from dataclasses import replace

    from megatron_rlspec.train.attention import PackedAttention, packed_sequences, rotary_factors

    dtype, device = getattr(torch, plan.dtype), torch.device(plan.device)
    options = SimpleNamespace(
        attention_dropout=0.0, window_size=None, softmax_type="vanilla", kv_channels=plan.head_dim
    )
    core = PackedAttention(options, 1, None, "self", pg_collection=SimpleNamespace(cp=None))
    for heads, groups, tokens in plan.attention:
        name = f"one sequence of {tokens:,}"
        packed = packed_sequences(torch.tensor([0, tokens]), groups, 1, 0, device)
        cos, sin = rotary_factors(torch.arange(tokens, device=device), plan.head_dim, 10000.0, dtype)
        packed = replace(packed, cos=cos, sin=sin)
        inputs = [
            torch.randn(tokens, count, plan.head_dim, device=device, dtype=dtype, requires_grad=True)
            for count in (heads, groups, groups)
        ]

        def forward(inputs: list[Any] = inputs, packed: Any = packed) -> Any:
            return core(*inputs, None, packed_seq_params=packed)

        note = f"{heads} and {groups} heads of {plan.head_dim}"
        with figures.attempt(f"forward, {name}"):
            forget_peak()
            figures.say(f"forward, {name}", _median(plan, forward), "ms", note)
            say_peak(figures, f"forward, {name}", peak_gib(), note)
        with figures.attempt(f"backward, {name}"):
            forget_peak()
            both = _median(plan, lambda: forward().sum().backward())
            figures.say(f"backward, {name}", both, "ms", f"{note}; forward and backward")
            say_peak(figures, f"backward, {name}", peak_gib(), note)


def _median(plan: Plan, work: Callable[[], Any]) -> float:
    """Measure the median of `plan.repeats` calls in milliseconds, after one that does not count."""
    work()
    return statistics.median(timed(work) for _ in range(plan.repeats))


def verify(plan: Plan, folder: Path, figures: Figures) -> None:
    """Draw the tokens of one round by the functions that the position-keyed verifier calls, in SGLang's kernels."""
    if plan.device == "cpu":
        from megatron_rlspec.rollout.sglang.cpu import stand_ins

        stand_ins.install()
    from sglang.srt.layers.sampler import multinomial_with_seed, sampling_from_probs_torch

    from megatron_rlspec.rollout.sglang.server.token_filter import filtered

    requests, nodes = plan.verify
    rows = requests * nodes
    device = torch.device(plan.device)
    logits = torch.randn(rows, plan.shape.vocab, device=device, dtype=torch.float32) * 4
    seeds = torch.arange(rows, device=device)
    positions = torch.arange(rows, device=device)
    most = torch.full((rows,), plan.shape.vocab, device=device)
    share = torch.full((rows,), 0.95, device=device)

    def greedy() -> Any:
        return logits.argmax(-1)

    def keyed() -> Any:
        return sampling_from_probs_torch(logits.softmax(-1), sampling_seed=seeds, positions=positions)

    def with_top_p() -> Any:
        kept = filtered(logits.softmax(-1), most, share, None)
        return multinomial_with_seed(torch.log(kept), seeds, positions)

    before = logits.nbytes / _GIB
    note = f"{requests} requests of {nodes} nodes, vocabulary {plan.shape.vocab}"
    for name, work in {"greedy": greedy, "temperature alone": keyed, "top-p": with_top_p}.items():
        with figures.attempt(name):
            figures.say(f"{name}: first call", timed(work), "ms", "with what it compiles")
            forget_peak()
            figures.say(f"{name}: a round", _median(plan, work), "ms", note)
            peak = peak_gib()
            if peak is not None:
                figures.say(f"{name}: peak beyond the logits", peak - before, "GiB", note)


PARTS: dict[str, Callable[[Plan, Path, Figures], None]] = {
    part.__name__: part for part in (model, decode, push, train, dry_run, attention, verify)
}


def main() -> None:
    name, folder, out = sys.argv[1:]
    plan = from_json(json.loads((Path(folder) / "plan.json").read_text()))
    if plan.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ["OMP_NUM_THREADS"] = "1"
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # a CPU would need a C++ compiler
        torch.set_num_threads(1)
    PARTS[name](plan, Path(folder), Figures(Path(out)))


if __name__ == "__main__":
    main()
