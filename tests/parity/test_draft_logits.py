"""The trainer's drafter computes what SGLang's engine computes: logits at (t, d), d = 1, 2, 3, from the same tokens.

The fast tier has this in two steps: the trainer equals an engine that is written out (train/test_model_parity.py), and
the rounds of SGLang's engine are those of the embedded one (rollout/test_sglang_engine.py).
"""

import captured
import numpy as np
import pytest
import tiny_mimo
import train_ranks

from megatron_rlspec.config import load
from megatron_rlspec.train.attention import Chain
from megatron_rlspec.train.step import Trainer
from megatron_rlspec.types import Sample

pytestmark = pytest.mark.slow
DEPTH = captured.DEPTH
TOLERANCE = 2e-4
CONFIG = tiny_mimo.config(hidden=64, layers=4, heads=4, kv_heads=2, ffn=128, vocab=160)
WEIGHTS = tiny_mimo.weights(CONFIG)
SERVE = (
    "--device cpu --dtype float32 --max-total-tokens 4096 --max-running-requests 4 --spec fixed --num-steps 3".split()
)


@pytest.fixture(scope="module")
def drafted(tmp_path_factory) -> list[tuple[Sample, captured.Chains]]:
    """Per sample, and per position t that the engine drafted from: its chain, and its logits `[DEPTH, V]`."""
    folder = tmp_path_factory.mktemp("parity")
    model = tiny_mimo.write(folder / "mimo", CONFIG, WEIGHTS)
    with captured.engine(folder, model, SERVE) as engine:
        return captured.draw(engine, folder, (1, 9), np.arange(CONFIG["vocab_size"]))


@pytest.fixture(scope="module")
def measured(drafted) -> dict[str, np.ndarray]:
    """Largest difference per depth of our drafter and of two that are wrong, on a rank of its own."""
    (found,) = train_ranks.on_ranks(1, measure, drafted)
    return found


def measure(drafted) -> dict[str, np.ndarray]:
    trainer = Trainer(load(None, {"model.dtype": "float32", "drafter.depth": str(DEPTH)}), CONFIG)
    trainer.load_hf(WEIGHTS)
    found = {"chain-exact": captured.gaps(trainer, drafted)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Chain, "next", lambda chain: Chain())  # depth d attends to its own inputs, as in Megatron
        found["megatron"] = captured.gaps(trainer, drafted)
    trainer.drafter.zero_first_embedding = False
    return found | {"no rule for position 0": captured.gaps(trainer, drafted[:1])}


def test_chain_exact_unrolling_is_the_engine_s(drafted, measured):
    assert {0, 8} <= {t for _, found in drafted for t in found} and sum(len(found) for _, found in drafted) > 15
    assert measured["chain-exact"].max() < TOLERANCE


def test_the_comparison_sees_megatrons_unrolling_and_a_missing_rule_for_position_0(measured):
    first, *deeper = measured["megatron"]
    assert first < TOLERANCE and min(deeper) > 100 * TOLERANCE
    assert measured["no rule for position 0"].max() > 100 * TOLERANCE
