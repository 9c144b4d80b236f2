"""Where a decode round of our hooks waits for the GPU: a committed list, with the reason of each place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import emulation
import pytest
import test_sglang_engine as same
import tiny_mimo

from megatron_rlspec.host.ports import ENGINES, free_port
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.rollout.sglang.client.launcher import EngineProcess
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.types import Sampling

SERVER = "megatron_rlspec/rollout/sglang/scheduler"
FILTER = {
    "token_filter.py:filtered: item": (1, "whether a nucleus is wider than the cut; not with a top-k below the cut")
}
FILTER_TWICE = {
    place: (2, f"{why}; again for the drafts that the catching up gives") for place, (_, why) in FILTER.items()
}
CATCHING_UP = {
    "drafter_gap.py:DrafterGap._passes: tolist": (1, "lengths of the requests, which SGLang has on the device only"),
    "drafter_gap.py:DrafterGap._missed_by: tolist": (1, "how many drafts were accepted in recent probes, all at once"),
    "stash.py:split: waiting copy to the GPU": (1, "which rows of recent rounds the passes read"),
    "drafter_gap.py:_on: waiting copy to the GPU": (3, "which token follows each request's part"),
    "drafter_gap.py:DrafterGap._part: waiting copy to the GPU": (1, "places and lengths of the drafter's pass"),
}
STORING = {
    "stash.py:Stash._stage: copy without waiting": (2, "hidden states and numbers of 64 rounds, on a stream of its own")
}
ALLOWED = {  # kind of a round -> place: (most reads in one round, why)
    "off": FILTER | STORING,
    "drafting": FILTER,
    "start": FILTER_TWICE | CATCHING_UP,
    "probe": FILTER_TWICE | CATCHING_UP,
}
SOMETIMES = {"probe": {f"{SERVER}/drafter_gap.py:DrafterGap._missed_by: tolist"}}  # after a probe that is still unread


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    """Run rounds of every kind: off, probes, the start of drafting, drafting. Top-p is on."""
    folder = tmp_path_factory.mktemp("audit")
    model = tiny_mimo.write(folder / "mimo", same.CONFIG, same.WEIGHTS)
    port = free_port(ENGINES)
    script = Path(__file__).with_name("auditing_serve.py")
    command = [sys.executable, str(script), str(folder / "reads.json"), "--model", str(model), "--port", str(port)]
    environment = os.environ | same.ONE_THREAD | {emulation.VARIABLE: ",".join(emulation.PARTS)}
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *same.SERVE, *same.LAUNCHES["adaptive"]], env=environment, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    with EngineProcess(process, f"http://127.0.0.1:{port}", log, Path(tempfile.mkdtemp()), api_key="") as running:
        engine = SGLangEngine.of(running.wait(180))
        computing = Roofline(0.0, token_ms=1 / 32, context_ms=1 / 1000, drafter=0.1)
        rule = {"candidates": [[0, 0, 0], [3, 1, 4]], "start": [0, 0, 0], "roofline": computing.to_json()}
        engine.update_weights(1, same.half_wrong_drafter().items())
        engine.set_spec_rule(rule | {"probe_share": 0.2})
        engine.generate(same.requests(12), Sampling(temperature=0.3, top_p=0.9, max_new_tokens=260, ignore_eos=True))
        return json.loads((folder / "reads.json").read_text())


@pytest.mark.slow  # starts an engine of its own; twenty seconds
@pytest.mark.parametrize("kind", ALLOWED)
def test_a_round_reads_from_the_gpu_where_it_is_allowed_only(found, kind):
    places = dict(found[kind])
    assert places.pop("rounds") >= (64 if kind == "off" else 1)
    most = {f"{SERVER}/{place}": count for place, (count, _) in ALLOWED[kind].items()}
    assert most.keys() - SOMETIMES.get(kind, set()) <= places.keys() <= most.keys(), places
    assert all(count <= most[place] for place, count in places.items()), places
