"""The user's own functions in the command line of `slime_path.py`, which slime calls by dotted path."""

import json
import os
from pathlib import Path

import requests

from megatron_rlspec.integrations.slime.options import Options
from megatron_rlspec.integrations.slime.seeds import sampling_seed
from megatron_rlspec.types import OFF, SpecConfig


def init(args):
    """`--custom-megatron-init-path`: our attention needs the position of each token."""
    from slime.backends.megatron_utils import model as slime_model
    from slime_cpu import packed_for_cpu

    slime_model.get_batch = packed_for_cpu(slime_model.get_batch, args)


def log_rollout(rollout_id, args, samples, extra, seconds):
    """`--custom-rollout-log-function-path`: record what the engines report after a rollout."""
    router = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
    engines = [worker["url"] for worker in requests.get(f"{router}/workers", timeout=30).json()["workers"]]
    told = [{name: ask(url, f"rlspec/control/{name}") for name in ("describe", "fingerprints")} for url in engines]
    for url in engines:  # until the next rollout, before which our hook sets its rule again
        ask(url, "rlspec/control/set_config", config=3)
    keyed = Options.from_args(args).verifier == "position_keyed"
    again = drawn_again(args, engines, samples) if keyed else []
    answers = [greedy(router, s.tokens[: len(s.tokens) - s.response_length]) for s in samples[::8]]
    rounds = [row for url in engines for row in ask(url, "rlspec/control/stats")["rounds"]]  # they are of no rollout
    row = {
        "rollout": rollout_id,
        "seconds": seconds,
        "reward": sum(s.reward for s in samples) / len(samples),
        "samples": len(samples),
        "tokens": sum(s.response_length for s in samples),
        "rounds": sum(sum(s.spec_info.histogram) for s in samples),
        "drafts": sum(i * n for s in samples for i, n in enumerate(s.spec_info.histogram)),
        "versions": sorted({str(v) for s in samples for v in s.weight_versions}),
        "engines": told,
        "again": again,
        "steps": sorted({row["config"]["num_steps"] for row in rounds}),
        "greedy": [(prompt, text) for prompt, text, _ in answers],
        "accept_length": sum(len(text) - 1 for _, text, _ in answers) / sum(verified for *_, verified in answers),
    }
    with open(Path(os.environ["RLSPEC_PATH_FOLDER"], "rollouts.jsonl"), "a") as file:
        file.write(json.dumps(row) + "\n")
    return False


def drawn_again(args, engines, samples):
    """Draw samples of the newest weights again on the first engine: without drafts, with three, with another seed.

    Returns for each the response, the three texts, and the rounds of the first two.
    """
    url = engines[0]
    newest = max(int(version) for sample in samples for version in sample.weight_versions)
    whole = [s for s in samples if {int(v) for v in s.weight_versions} == {newest} and not s.metadata]
    found = []
    for sample in whole[::3]:
        prompt = sample.tokens[: len(sample.tokens) - sample.response_length]
        own = sampling_seed(args.rollout_seed, sample.index)
        drawn = []
        for config, number in ((OFF, own), (SpecConfig(3), own), (SpecConfig(3), own + 1)):
            ask(url, "rlspec/control/set_config", config=config.to_json())
            sampling = {"temperature": 1.0, "max_new_tokens": args.rollout_max_response_len, "sampling_seed": number}
            drawn.append(ask(url, "generate", input_ids=prompt, sampling_params=sampling))
        texts = [answer["output_ids"] for answer in drawn]
        rounds = [answer["meta_info"].get("spec_verify_ct", 0) for answer in drawn[:2]]
        found.append((sample.tokens[len(prompt) :], *texts, *rounds))
    return found


def ask(engine, path, **body):
    answer = requests.post(f"{engine}/{path}", json=body, timeout=60)
    answer.raise_for_status()
    return answer.json()


def greedy(router, prompt):
    """Return (prompt, the engine's greedy text, its rounds after the prefill's token)."""
    sampling = {"temperature": 0, "max_new_tokens": 13, "ignore_eos": True}
    answer = ask(router, "generate", input_ids=prompt, sampling_params=sampling)
    return prompt, answer["output_ids"], answer["meta_info"]["spec_verify_ct"]
