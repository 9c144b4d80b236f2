"""`rlspec train` with an EAGLE-3 drafter and SGLang's own EAGLE3: both models are trained and pushed."""

import json
import shutil
from pathlib import Path

import pytest
from short_run import finish, train

from megatron_rlspec.commands.convert import main as convert
from megatron_rlspec.models.hf_files import read_hf, write_hf
from megatron_rlspec.records.recorder import read_records

OPTIONS = {"drafter__kind": "eagle3", "spec__mode": "fixed", "drafter__lr": "1e-2", "drafter__warmup_steps": 0}


@pytest.fixture(scope="module")
def models(start, tmp_path_factory) -> tuple[Path, Path]:
    """A Qwen2 of the quickstart's decoder, and a fresh drafter for it: two directories."""
    folder = tmp_path_factory.mktemp("eagle3")
    config, tensors = read_hf(start / "model")
    config |= {"architectures": ["Qwen2ForCausalLM"], "num_nextn_predict_layers": 0}
    kept = {name: tensors[name] for name in tensors if ".mtp_layers." not in name}
    write_hf(folder / "qwen2", config, kept, tokenizer_from=start / "model")
    assert convert([str(folder / "qwen2"), str(folder / "drafter"), "--add-eagle3", "--draft-vocabulary", "24"]) == 0
    return folder / "qwen2", folder / "drafter"


@pytest.mark.slow
def test_a_run_trains_and_pushes_both_models_and_resumes_or_leaves_the_drafter_alone(start, models, tmp_path):
    target, drafter = models
    options = OPTIONS | {"model__path": target, "drafter__path": drafter}
    finish(train(start, tmp_path, train__steps=2, **options))
    for name in ("hf", "hf_drafter"):
        shutil.rmtree(tmp_path / name)
    finish(train(start, tmp_path, train__steps=4, train__resume="true", **options))
    records = read_records(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == [0, 1, 2, 3]
    own = [name for name in read_hf(drafter)[1] if name not in ("d2t", "t2d")]
    for record in records:
        assert record["push/failed_engines"] == 0
        assert record["push/tensors"] == len(read_hf(target)[1]) + len(own)
        assert record["drafter/grad_norm"] > 0 and record["policy/train_rollout_logprob_abs_diff"] < 1e-3
        assert record["spec/verified_tokens"] >= 1
    held = read_records(tmp_path / "events.jsonl")
    options = {name: value for name, value in options.items() if name not in ("drafter__lr", "drafter__warmup_steps")}
    options |= {"drafter__train": "false", "spec__mode": "adaptive"}
    finish(train(start, tmp_path / "frozen", train__steps=1, **options))
    (frozen,) = read_records(tmp_path / "frozen/metrics.jsonl")
    assert frozen["push/tensors"] == len(read_hf(target)[1]) and frozen["push/failed_engines"] == 0
    print("accept lengths:", [round(record["spec/verified_tokens"], 3) for record in records])
    held += read_records(tmp_path / "frozen/events.jsonl")
    assert not [event for event in held if event["kind"] == "health"]
    assert json.loads((tmp_path / "config.json").read_text())["drafter"]["kind"] == "eagle3"
