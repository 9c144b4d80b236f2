"""An engine of `capturing_serve.py`, and the chains of drafts that its passes were."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rlspec.host.ports import ENGINES, free_port
from megatron_rlspec.packing.pack import pack
from megatron_rlspec.packing.shift import shift_packed
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.rollout.sglang.client.launcher import EngineProcess
from megatron_rlspec.types import Prompt, Request, Sample, Sampling

DEPTH = 3
Chains = dict[int, tuple[list[int], np.ndarray]]  # position t -> the chain drafted from there, its logits [DEPTH, V]


@contextmanager
def engine(folder: Path, model: Path, arguments: Sequence[str]) -> Iterator[SGLangEngine]:
    """Serve `model`; passes are written while `folder`/passes exists."""
    port = free_port(ENGINES)
    script = Path(__file__).with_name("capturing_serve.py")
    command = [sys.executable, str(script), str(folder / "passes"), "--model", str(model), "--port", str(port)]
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *arguments], stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    with EngineProcess(process, f"http://127.0.0.1:{port}", log, Path(tempfile.mkdtemp()), api_key="") as running:
        yield SGLangEngine.of(running.wait(180), timeout=120)


def draw(served: SGLangEngine, folder: Path, lengths: Sequence[int], words: np.ndarray) -> list[tuple[Sample, Chains]]:
    """Draw one greedy sample after prompts of these lengths: drafts then have no noise.

    A one-token prompt is drafted from at position 0.

    `words` [V]: the token of each column of the drafter's logits.
    """
    found = []
    seen = 0
    for i, length in enumerate(lengths):
        prompt = Prompt(i, np.arange(5, 5 + length))
        greedy = Sampling(temperature=0, max_new_tokens=12, ignore_eos=True)
        (sample,) = served.generate([Request(f"r{i}", prompt, seed=7)], greedy)
        files = sorted((folder / "passes").glob("*.npz"))[seen:]
        seen += len(files)
        found.append((sample, chains([np.load(file) for file in files], words)))
    return found


def chains(passes, words: np.ndarray) -> Chains:
    """Every round is one (draft-)extend, whose row at t is depth 1, and DEPTH - 1 decode passes."""
    found = {}
    for first in range(0, len(passes) - DEPTH + 1, DEPTH):
        extend, *decodes = passes[first : first + DEPTH]
        assert "EXTEND" in str(extend["mode"]) and all(str(p["mode"]) == "DECODE" for p in decodes)
        t = int(decodes[0]["positions"][0]) - 1
        row = -1 if len(extend["logits"]) == 1 else int(np.flatnonzero(extend["positions"] == t)[0])
        chain = [int(p["input_ids"][0]) for p in decodes]
        assert words[extend["logits"][row].argmax()] == chain[0]
        found[t] = (chain, np.stack([extend["logits"][row], *(p["logits"][0] for p in decodes)]))
    return found


def gaps(trainer: Any, drafted: Sequence[tuple[Sample, Chains]]) -> np.ndarray:
    """Return the largest difference per depth between the logits of the trainer's drafter and the engine's."""
    from test_model_parity import drafter_logits

    worst = np.zeros(DEPTH)
    for sample, found in drafted:
        (batch,) = pack([sample], depth=DEPTH, tokens_per_micro_batch=1024)
        tokens = [shift_packed(batch.tokens, batch.cu_seqlens, d) for d in range(1, DEPTH + 1)]
        for t, (chain, _) in found.items():  # the drafter reads x_{t+1}, then the engine's own chain from t
            for depth, token in enumerate(chain, 2):
                tokens[depth - 1][t] = token
        _, logits = drafter_logits(trainer, replace(batch, drafter_tokens=tokens))
        for t, (_, expected) in found.items():
            if t < len(sample.tokens) - 1:
                ours = np.stack([of_depth[t].numpy() for of_depth in logits])
                worst = np.maximum(worst, np.abs(ours - expected).max(axis=1))
    return worst
