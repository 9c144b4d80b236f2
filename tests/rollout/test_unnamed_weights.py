"""A push to an engine whose weights have no known names is checked by what the loaders were given."""

from __future__ import annotations

import pytest
import tiny_mimo

from megatron_rlspec.push.fingerprint import as_delivered, fingerprint
from megatron_rlspec.push.push import Pusher
from megatron_rlspec.rollout.sglang.bucket_checks import ServedTensors
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.rollout.sglang.client.launcher import launch
from megatron_rlspec.rollout.sglang.schemas import Refusal

CONFIG = tiny_mimo.config(hidden=64, layers=2, heads=4, kv_heads=2, ffn=128, vocab=160)
CONFIG |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "attention_bias": False}
CONFIG["num_nextn_predict_layers"] = 0
REASON = "SGLang's MistralForCausalLM stores weights in a form that is not known here"


def weights(seed: int = 0) -> dict:
    found = tiny_mimo.weights(CONFIG, seed)
    return {name: tensor for name, tensor in found.items() if "mtp_layers" not in name and "bias" not in name}


def test_each_tensor_counts_by_the_loader_that_keeps_it():
    delivered = {"target": {"a": 1, "mtp.b": 2}, "drafter": {"a": 3, "mtp.b": 4}}
    assert as_delivered(delivered, {"mtp.b"}.__contains__) == {"a": 1, "mtp.b": 4}


def test_only_the_scope_of_known_names_is_checked():
    served = ServedTensors({}, frozenset({"mtp.b"}), unnamed=REASON)
    served.check("anything", [3], "all")
    served.check("mtp.b", [3], "drafter")
    with pytest.raises(Refusal, match="mtp.b is the drafter's; scope is target"):
        served.check("mtp.b", [3], "target")


@pytest.mark.slow
def test_a_push_to_an_unknown_family(tmp_path, caplog):
    old = weights()
    new = weights(seed=1)
    tiny_mimo.write(tmp_path / "model", CONFIG, old)
    options = ["--device", "cpu", "--dtype", "float32", "--max-total-tokens", "2048", "--spec", "off"]
    log = tmp_path / "log"
    with launch(tmp_path / "model", log, arguments=options) as process:
        engine = SGLangEngine.of(process.wait(), timeout=60)
        assert engine.describe()["unnamed"] == REASON
        pusher = Pusher({"e": engine})
        assert not pusher.push(1, lambda scope: new.items()).failed
        assert engine.fingerprints() == {name: fingerprint(tensor) for name, tensor in new.items()}
        name = "model.layers.0.mlp.up_proj.weight"
        engine.update_weights(2, {**new, name: old[name]}.items())
        assert pusher.compare_with(pusher.engines["e"]).differing == (name,)
    assert sum(REASON in record.getMessage() for record in caplog.records) == 1
    assert log.read_text().count(REASON) == 1
