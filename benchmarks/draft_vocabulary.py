"""What a draft head over fewer words gains: python benchmarks/draft_vocabulary.py [--model DIR] [--answers FILE]

The embedded engine decodes on the CPU, plainly and with k drafts from all words or from N, in turn within each
repetition. The figures are CPU seconds of this process, so other work on the machine matters little. Without --model:
the sizes of SmolLM2-135M (49,152 words) with random weights, on which hardly a draft is accepted, so that only costs
are shown. With --answers, a file of `rlspec answer`, also the share of words covered: words are chosen on the first
half of the answers and counted on the second. The last lines are predicted from parameter counts, and marked so.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np
import torch

from megatron_rlspec.models.hf_files import read_hf
from megatron_rlspec.rollout.embedded.engine import EmbeddedEngine
from megatron_rlspec.rollout.embedded.model import Architecture, Decoder
from megatron_rlspec.rollout.embedded.parallel import Solo
from megatron_rlspec.speculation.acceptance import accept_length, pooled
from megatron_rlspec.speculation.learnt_cost import LearntCost
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.speculation.rule import SpecRule
from megatron_rlspec.speculation.vocabulary import DraftVocabulary
from megatron_rlspec.types import OFF, Prompt, Request, Sampling, SpecConfig, SpecSchedule

SMOLLM2 = {
    "architectures": ["MiMoForCausalLM"], "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152, "rms_norm_eps": 1e-5,
    "rope_theta": 1e5, "tie_word_embeddings": True, "num_nextn_predict_layers": 1, "eos_token_id": 2,
}  # fmt: skip
MIMO_7B = {
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151680,
}  # fmt: skip


def main() -> None:
    args = _parser().parse_args()
    torch.set_num_threads(1)
    config, engine = _engine(args)
    answers = _answers(args.answers) if args.answers else []
    counts = DraftVocabulary(args.words, config["vocab_size"], (2,))
    counts.observe(answers[: len(answers) // 2])
    print(
        f"{args.model or 'random weights'}: {config['vocab_size']} words, {args.dtype}; load {os.getloadavg()[0]:.0f}"
    )
    for size in (1024, 2048, 4096, 8192, 16384, 32768) if answers else ():
        chosen = DraftVocabulary(size, config["vocab_size"], (2,))
        chosen.observe(answers[: len(answers) // 2])
        later = np.concatenate(answers[len(answers) // 2 :])
        share = np.isin(later, chosen.ids()).mean()
        print(f"{size:6} words cover {share:.2%} of {len(later)} tokens of other answers")
    prompts = [answer[:8] for answer in answers if len(answer) >= 8] or [np.arange(3 + i, 11 + i) for i in range(64)]
    print(
        "batch  k  a plain round; a round with drafts in plain rounds, from all words and from "
        f"{args.words}; all / {args.words}"
    )
    for batch in args.batches:
        _row(engine, counts.ids(), prompts, batch, args)
    for batch in args.batches if args.rules else ():
        _rules(engine, config, prompts, batch, args)
    for name, shape, words in (("SmolLM2-135M", SMOLLM2, args.words), ("MiMo-7B", MIMO_7B, 32768)):
        whole, part = (Roofline.of_model(shape, draft_vocabulary=n).drafter for n in (0, words))
        faster = 1 - (1 + 3 * part) / (1 + 3 * whole)
        print(
            f"predicted by parameters read, {name}, {shape['vocab_size']} words: a draft takes {whole:.1%} of a pass, "
            f"over {words} words {part:.1%}; a round of 3 drafts that waits for memory takes {faster:.1%} less time"
        )


def _row(
    engine: EmbeddedEngine,
    words: np.ndarray,
    prompts: list[np.ndarray],
    batch: int,
    args: argparse.Namespace,
) -> None:
    runs = {("plain", 0): []} | {(name, k): [] for k in args.steps for name in ("all", "part")}
    accepted: dict[tuple[str, int], list] = {key: [] for key in runs}
    for repetition in range(-1, args.repetitions):
        for name, k in runs:
            engine.model.draft_ids = None  # all words
            if name == "part":
                engine.set_draft_vocabulary(words)
            engine.set_schedule(SpecSchedule.fixed(SpecConfig(k) if k else OFF))
            requests = [Request(f"{i}.", Prompt(i, prompts[i % len(prompts)]), i) for i in range(batch)]
            sampling = Sampling(temperature=0.7, max_new_tokens=args.tokens, ignore_eos=True)
            began = time.process_time()
            samples = engine.generate(requests, sampling)
            took = time.process_time() - began
            rounds = sum(stat.rounds for stat in engine.stats())
            if repetition >= 0:
                runs[name, k].append((1e3 * took / rounds, took))
                accepted[name, k] += [sample.accepted for sample in samples]
    for k in args.steps:
        plain, whole, part = (np.array(runs[key])[:, 0] for key in (("plain", 0), ("all", k), ("part", k)))
        seconds, lengths = {}, {}
        for name in ("all", "part"):
            lengths[name] = accept_length(pooled(accepted[name, k]))
            seconds[name] = np.array(runs[name, k])[:, 1]
        print(
            f"{batch:5} {k:2}  plain {np.median(plain):8.1f} CPU ms {_ratio(whole, plain)} {_ratio(part, plain)} "
            f"{_ratio(whole, part)}  accept length {lengths['all']:.3f} {lengths['part']:.3f}, "
            f"tokens per CPU second {_ratio(seconds['all'], seconds['part'])}"
        )


def _rules(
    engine: EmbeddedEngine, config: dict, prompts: list[np.ndarray], batch: int, args: argparse.Namespace
) -> None:
    """Compare rules without a cost table with plain decoding: the newest rollouts of each, and the first one."""
    rules = {
        "plain": {"schedule": SpecSchedule.fixed(OFF).to_json()},
        "layers": {"roofline": Roofline.of_layers(config["num_hidden_layers"]).to_json()},
        "learnt": {"learnt": LearntCost(Roofline.of_model(config)).to_json()},
    }
    engine.model.draft_ids = None
    seconds: dict[str, list[float]] = {name: [] for name in rules}
    off: dict[str, list[float]] = {name: [] for name in rules}
    kept: dict[str, SpecRule] = {}
    for repetition in range(args.repetitions + 1):
        for name, data in rules.items():
            engine.choice.rule = kept.get(name)  # each contestant inherits from its own former rule
            acceptance = {"acceptance": kept[name].acceptance.to_json()} if name in kept else {}
            engine.set_spec_rule(data | acceptance)
            requests = [Request(f"{i}.", Prompt(i, prompts[i % len(prompts)]), repetition) for i in range(batch)]
            sampling = Sampling(temperature=0.7, max_new_tokens=4 * args.tokens, ignore_eos=True)
            began = time.process_time()
            engine.generate(requests, sampling)
            seconds[name].append(time.process_time() - began)
            rounds = engine.spec_rule_report()["rounds"]
            off[name].append(rounds.get("off", 0) / sum(rounds.values()))
            kept[name] = engine.choice.rule
    engine.stats()
    plain = np.array(seconds["plain"])
    for name in ("layers", "learnt"):
        ratio = plain / np.array(seconds[name])
        print(
            f"{batch:5}  rule by {name}: tokens per CPU second against plain decoding: first rollout {ratio[0]:.3f}, "
            f"later {_ratio(plain[1:], np.array(seconds[name])[1:])}; off in {np.mean(off[name][1:]):.0%} of rounds"
        )


def _ratio(one: np.ndarray, other: np.ndarray) -> str:
    """The median of ratios within a repetition, and its bootstrap interval."""
    ratios = one / other
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(ratios, (2000, len(ratios))), axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    return f"{np.median(ratios):.3f} [{low:.3f}, {high:.3f}]"


def _engine(args: argparse.Namespace) -> tuple[dict, EmbeddedEngine]:
    options = {"dtype": getattr(torch, args.dtype), "max_running_requests": 64, "max_total_tokens": 64 * 160}
    if args.model:
        config, tensors = read_hf(args.model)
        return config, EmbeddedEngine(config, tensors.items(), max_length=160, **options)
    generator = torch.Generator().manual_seed(0)
    shapes = Decoder(Architecture.from_hf(SMOLLM2), torch.float32, "cpu", Solo(), 16).tensors
    made = {name: 0.04 * torch.randn(shard.view.shape, generator=generator) for name, shard in shapes.items()}
    return SMOLLM2, EmbeddedEngine(SMOLLM2, made.items(), max_length=160, **options)


def _answers(path: Path) -> list[np.ndarray]:
    return [np.array(json.loads(line)["response_tokens"]) for line in path.read_text().splitlines()]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="", help="a Hugging Face directory with a drafter that the embedded engine runs"
    )
    parser.add_argument("--answers", type=Path, help="lines with response_tokens")
    parser.add_argument("--words", type=int, default=8192)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--tokens", type=int, default=10, help="new tokens of each sample")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--rules", action="store_true", help="also compare rules without a cost table")
    parser.add_argument("--dtype", default="float32")
    return parser


if __name__ == "__main__":
    main()
