"""`rlspec answer`: ids as the engine drew them, resumable, and read by the warm start as they are."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import short_run
import tiny_mimo
import torch
from train_ranks import on_ranks

from megatron_rlspec import files
from megatron_rlspec.commands import answer
from megatron_rlspec.commands.journal import Journal
from megatron_rlspec.config import ConfigError, SftConfig, load
from megatron_rlspec.models.directory import check_model
from megatron_rlspec.models.hf_files import read_hf
from megatron_rlspec.packing.pack import pack
from megatron_rlspec.records.recorder import read_records
from megatron_rlspec.rollout.embedded.engine import EmbeddedEngine
from megatron_rlspec.rollout.start import Kind
from megatron_rlspec.speculation.acceptance import accept_length, pooled
from megatron_rlspec.tasks import data
from megatron_rlspec.types import SHARPNESS, Prompt, Request, Sampling, SpecConfig

DRAFTS = (1, 3, 5)


def options(start: Path, path: Path, **more: str):
    found = {
        name: str(value) for name, value in short_run.SMALL.items() if not name.startswith(("reward", "train", "spec"))
    }
    found |= {"model.path": str(start / "model"), "data.path": str(start / "task/rl.jsonl"), "answer.path": str(path)}
    found |= {"rollout.engine": "embedded", "answer.prompts": "12", "spec.mode": "off"}
    if "rollout__urls" in more:
        del found["rollout.max_total_tokens"]
    return load(None, found | {name.replace("__", "."): value for name, value in more.items()})


def answered(config) -> list[dict]:
    print(answer.answer(config, check_model(config.model.path, "serve", drafter=False)))
    return [json.loads(line) for line in Path(config.answer.path).read_text().splitlines()]


def by_id(rows: list[dict]) -> dict:
    return {(row["row"], row["sample"]): row for row in rows}


def test_rows_hold_what_the_engine_drew(start, tmp_path):
    config = options(start, tmp_path / "a.jsonl")
    rows = by_id(answered(config))
    assert set(rows) == {(prompt, number) for prompt in range(12) for number in range(4)}
    tokenizer = data.load_tokenizer(start / "model")
    end = tokenizer.eos_token_id
    for row in rows.values():
        assert row["status"] == ("finished" if row["response_tokens"][-1] == end else "truncated")
        assert len(row["response_tokens"]) <= 24 and row["label"]
        assert tokenizer.decode(row["prompt_tokens"]) == row["prompt"]
    assert {row["status"] for row in rows.values()} == {"finished", "truncated"}

    # The warm start takes these ids: it tokenises nothing, and adds no end.
    samples, dropped = data.read_demonstrations(tmp_path / "a.jsonl", config.data, tokenizer, 256)
    assert dropped == 0
    texts = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    for sample, row in zip(samples, texts, strict=True):
        assert sample.tokens.tolist() == row["prompt_tokens"] + row["response_tokens"]
        assert sample.loss_mask.sum() == len(row["response_tokens"])


def test_an_interrupted_command_goes_on(start, tmp_path):
    whole = by_id(answered(options(start, tmp_path / "whole.jsonl")))
    config = options(start, tmp_path / "half.jsonl")
    answered(config)
    content = Path(config.answer.path).read_bytes()
    Path(config.answer.path).write_bytes(content[: len(content) * 2 // 5])  # in the middle of a row
    assert by_id(answered(config)) == whole
    more = options(start, tmp_path / "half.jsonl", rollout__samples_per_prompt="5")
    rows = by_id(answered(more))
    assert len(rows) == 60 and whole.items() <= rows.items()
    (tmp_path / "half.jsonl.settings.json").unlink()
    with pytest.raises(ConfigError, match="expected another file"):
        answered(config)


def test_a_changed_row_is_no_answer(tmp_path):
    held, prompts = {"seed": 1}, [Prompt(3, np.array([1, 2]))]
    path = tmp_path / "a.jsonl"
    row = {"row": 3, "sample": 0, "status": "finished", "response_tokens": [4]}
    Journal(path, held, prompts)
    path.write_text(json.dumps(row) + "\n")
    assert Journal(path, held, prompts).done == {"p000000003-n0000000": "finished"}
    path.write_text(json.dumps(row | {"row": 4}) + "\n" + json.dumps(row | {"status": "aborted"}) + "\n")
    with pytest.raises(data.DataError, match=r"a\.jsonl:2: not a row of `rlspec answer`"):
        Journal(path, held, prompts)


@pytest.mark.parametrize(
    ("option", "value", "part"),
    [("rollout__temperature", "0.5", "temperature"), ("data__label_key", "prompt", "prompts"), ("model", "", "model")],
)
def test_answers_of_another_kind_are_not_mixed(start, tmp_path, option, value, part):
    shutil.copytree(start / "model", tmp_path / "model")
    (tmp_path / "task").symlink_to(start / "task")

    def held(**changes: str) -> dict:
        config = options(tmp_path, tmp_path / "a.jsonl", **changes)
        tokenizer = data.load_tokenizer(config.model.path)
        prompts, _ = data.read_prompts(config.data.path, config.data, tokenizer, config.longest_prompt)
        return answer.settings(config, prompts)

    Journal(tmp_path / "a.jsonl", held(), [])
    (tmp_path / "a.jsonl").write_text("{}\n")
    os.utime(tmp_path / "model/config.json", (0, 0))
    Journal(tmp_path / "b.jsonl", held(), [])  # the same contents, of another date
    assert (tmp_path / "b.jsonl.settings.json").read_text() == (tmp_path / "a.jsonl.settings.json").read_text()
    changes = {option: value}
    if part == "model":
        changes = {}
        (tmp_path / "model/chat_template.jinja").write_text("x")
    with pytest.raises(ConfigError, match=f"another `{part}` .*expected another file"):
        Journal(tmp_path / "a.jsonl", held(**changes), [])


def test_answers_of_a_server_with_other_weights_are_not_mixed(start, tmp_path, monkeypatch):
    """Engines at rollout.urls hold what others gave them; here embedded ones answer in their place."""
    hf_config, tensors = read_hf(start / "model")
    scales = [1.0]

    class Served:
        def __init__(self, *_):
            pass

        def engine(self, scale):
            weights = ((name, tensors[name] * scale) for name in tensors)
            return EmbeddedEngine(hf_config, weights, max_total_tokens=8192, max_length=256)

        def launch(self):
            pass

        def wait(self):
            return {f"http://127.0.0.1:3000{i}": self.engine(scale) for i, scale in enumerate(scales)}

        def close(self):
            pass

    monkeypatch.setitem(answer.KINDS, "sglang", Kind(Served))
    config = options(start, tmp_path / "a.jsonl", rollout__engine="sglang", rollout__urls="http://127.0.0.1:30000")
    assert len(answered(config)) == len(answered(config)) == 48
    scales[0] = 1.01
    with pytest.raises(ConfigError, match="another `served`"):
        answered(config)
    scales.append(1.0)
    with pytest.raises(ConfigError, match=r"rollout\.urls: the engines hold different weights"):
        answered(config)


def test_one_command_at_a_time_writes_a_file(start, tmp_path):
    with files.locked(tmp_path / "a.jsonl"), pytest.raises(files.FileError, match=r"a\.jsonl: another process uses it"):
        answered(options(start, tmp_path / "a.jsonl"))
    assert (tmp_path / "a.jsonl").read_bytes() == b"" and not (tmp_path / "a.jsonl.settings.json").exists()


def test_held_out_prompts_are_not_trained(start, tmp_path):
    config = options(start, tmp_path / "a.jsonl", sft__held_out="5")
    answered(config)
    tokenizer = data.load_tokenizer(start / "model")
    longest = config.model.max_length
    reading = data.Reading(config.data, tokenizer, longest, config.train.seed)
    rows = data.Demonstrations(config.answer.path, reading, config.sft)
    prompts = [{row.prompt.tokens.tobytes() for row in part} for part in (rows.rows, rows.held_out)]
    assert len(prompts[1]) == 5 and not prompts[0] & prompts[1] and len(rows.rows) + len(rows.held_out) == 48
    with pytest.raises(data.DataError, match="sft.held_out=12 leaves none to train on"):
        data.Demonstrations(config.answer.path, reading, SftConfig(held_out=12))
    data.check_ids(rows.rows, vocab_size=10_000)
    with pytest.raises(data.DataError, match="token .*, but config.json says vocab_size=3"):
        data.check_ids(rows.held_out, vocab_size=3)


def test_a_warm_start_learns_from_them_and_stops_on_a_plateau(start, tmp_path):
    config = options(start, tmp_path / "a.jsonl")
    answered(config)
    run_dir = tmp_path / "run"
    warm = {"sft.path": config.answer.path, "sft.drafter_only": "true", "sft.held_out": 3, "sft.eval_every": 1}
    warm |= {
        "drafter.lr": 1e-6,
        "drafter.warmup_steps": 0,
        "sft.steps": 9,
        "sft.samples_per_step": 8,
        "data.eval_path": "",
        "train.save_every": 2,
        "config": tmp_path / "run.toml",
    }
    warm["config"].write_text("[rollout]\nstaleness = 1\n")  # of `rlspec train`, which takes the same file
    output = short_run.run(start, run_dir, command="sft", **warm, **{"drafter.loss": "forward_kl"})
    lines = output.splitlines()
    assert f"rlspec sft: loading {start / 'model'} (MiMoForCausalLM" in lines[0]
    assert f"written: {run_dir / 'hf'}, policy and drafter as a Hugging Face checkpoint" in lines
    found = [event for event in read_records(run_dir / "events.jsonl") if event["kind"] == "drafter"]
    assert [event["step"] for event in found] == [1, 2, 3], "two evaluations without a rise end it"
    assert [event["tokens"] for event in found] == sorted({event["tokens"] for event in found})
    assert all(1 <= event[f"accept_length_{k}"] <= k + 1 for event in found for k in DRAFTS)
    chosen = read_hf(run_dir / "hf")[0]["rlspec_sharpness"]  # with which engines begin
    layouts = sorted((run_dir / "checkpoints").glob("step-*/layout.json"))
    assert chosen in SHARPNESS and chosen == json.loads(layouts[-1].read_text())["sharpness"]
    policy = [dict(read_hf(path)[1]) for path in (start / "model", run_dir / "hf")]
    assert all(torch.equal(policy[1][name], tensor) == ("mtp" not in name) for name, tensor in policy[0].items())


def replayed(hf_config, tensors, samples) -> tuple[dict[int, float], float]:
    from megatron_rlspec.train.step import Trainer

    options = {"model.dtype": "float32", "drafter.depth": "2", "rollout.temperature": "0.6"}
    trainer = Trainer(load(None, options), hf_config)
    trainer.load_hf(tensors)
    found = trainer.accept_lengths(pack(samples, depth=5, tokens_per_micro_batch=512), DRAFTS)
    return found, trainer.sharpness


def test_the_trainer_measures_what_an_engine_accepts():
    """The drafter's argmax is often the policy's token: the engine's accept lengths, and a forward over its texts."""
    hf_config = tiny_mimo.config(hidden=32, layers=2, heads=4, kv_heads=2, ffn=64, vocab=40)
    tensors = tiny_mimo.agreeing(tiny_mimo.weights(hf_config, std=0.3), 40)
    worse = 1 + 0.5 * torch.randn(32, generator=torch.Generator().manual_seed(1))
    tensors["model.mtp_layers.0.final_layernorm.weight"] = tensors["model.mtp_layers.0.final_layernorm.weight"] * worse
    engine = EmbeddedEngine(hf_config, tensors.items(), max_total_tokens=8192, max_length=256, drafts="coupled")
    asked = [Request(f"r{i:02d}", Prompt(i, np.arange(3, 9 + i % 3)), seed=i) for i in range(24)]

    def accepted(k: int, sharpness: float) -> tuple[float, list]:
        engine.set_config(SpecConfig(k), sharpness)
        samples = engine.generate(asked, Sampling(0.6, max_new_tokens=40, ignore_eos=True))
        return accept_length(pooled(sample.accepted for sample in samples)), samples

    expected = {s: accepted(5, s)[0] for s in SHARPNESS}
    _, samples = accepted(5, 1.0)
    (found, sharpness) = on_ranks(1, replayed, hf_config, dict(tensors), samples)[0]
    print(f"accept lengths: trainer {found}, {sharpness}, engine {expected}")
    lengths = {k: accepted(k, sharpness)[0] for k in DRAFTS}
    print(lengths)
    assert sharpness == max(expected, key=lambda s: expected[s])
    assert 1.3 < lengths[1] < 1.95 and lengths[5] > lengths[1] + 0.2
    np.testing.assert_allclose([found[k] for k in DRAFTS], [lengths[k] for k in DRAFTS], rtol=0.03)
