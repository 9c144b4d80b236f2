"""One decision for all ranks under attention data parallelism: the decision's inputs, and an engine with two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_pushed_families import checkpoint, config_of
from test_served_families import agreeing

from megatron_rlspec.engine import EngineError
from megatron_rlspec.host.ports import ENGINES, free_port
from megatron_rlspec.models.hf_files import write_hf
from megatron_rlspec.push.push import Pusher
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.rollout.sglang.client.launcher import EngineProcess, launch
from megatron_rlspec.rollout.sglang.scheduler.attention_ranks import KEPT, Joint, Share
from megatron_rlspec.rollout.sglang.scheduler.decisions import Decider, DecodeRound, LateRounds
from megatron_rlspec.rollout.sglang.settings import Settings
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.types import OFF, Prompt, Request, Sampling, SpecConfig, SpecSchedule

lags = st.lists(st.integers(0, 5), max_size=2 * KEPT)


@given(st.lists(lags, min_size=1, max_size=4).filter(any), st.data())
def test_every_rank_gets_the_same_inputs(ranks, data):
    shares = [Share(10 * len(found), True, any(found), False, found, [1, 3], 2) for found in ranks]
    rows = np.array([share.row(3) for share in shares])
    joints = [Joint(rows, rank) for rank in range(len(ranks))]
    everyone = sorted(lag for found in ranks for lag in found)
    n = data.draw(st.sampled_from([1, 2, len(everyone), 128]))
    assert {joint.batch for joint in joints} == {len(everyone)}
    assert {joint.context for joint in joints} == {10 * len(everyone)}
    assert {joint.open for joint in joints} == {any(map(any, ranks))}
    assert {joint.missed(n) for joint in joints} == {sum(everyone[: n if n <= KEPT else None])}
    assert sum(joint.own(n) for joint in joints) == (min(n, len(everyone)) if n <= KEPT else len(everyone))
    assert joints[0].accepted == [1] * len(ranks) + [3] * len(ranks) and joints[0].others == 2 * len(ranks)


def test_one_rank_keeps_all_from_a_round_without_the_verify_path():
    shares = [Share(0, True, False, False, []), Share(9, False, False, True, [0])]
    joint = Joint(np.array([share.row(0) for share in shares]), 0)
    assert not joint.plain and joint.needed and joint.own(1) == 0 and not joint.accepted


def test_rules_on_two_ranks_learn_the_same_from_late_rounds():
    """Rank 1 has no requests in the second round. Results come one launch late on rank 0, at once on rank 1."""
    deciders = [Decider(Settings()) for _ in range(2)]
    for decider in deciders:
        decider.start([0, 3], 3)
    seen = [[3, 0], []], [[1], []], [[2, 2], [0]]
    launched: list[tuple[int, DecodeRound]] = []
    for accepted in (*seen, [[], []], [[], []]):
        due = [decider.late.due() for decider in deciders]
        assert due[0][0] == due[1][0]
        shares = [Share(5, True, False, False, [0], *found[1:]) for found in due]
        joint = Joint(np.array([share.row(3) for share in shares]), 0)
        for decider, counts in zip(deciders, accepted, strict=True):
            if due[0][0] is not None:
                decider.learn(due[0][0], joint.accepted, joint.others)
            ran = DecodeRound(SpecConfig(3), 5, None, decider.late.begin(SpecConfig(3)), 3)
            if decider is deciders[1]:
                decider.observe(ran, counts, 0)
            else:
                launched.append((counts, ran))
        if len(launched) > 1:
            deciders[0].observe(launched[-2][1], launched[-2][0], 0)
    assert deciders[0].rule.acceptance.rates == deciders[1].rule.acceptance.rates
    alone = Decider(Settings())
    alone.start([0, 3], 3)
    for counts in seen:
        alone.rule.observe(SpecConfig(3), [n for rank in counts for n in rank])
    assert deciders[0].rule.acceptance.rates == alone.rule.acceptance.rates
    assert LateRounds().due() == (None, (), 0)


# An engine with two ranks.

CONFIG = config_of("Glm4MoeForCausalLM", bos_token_id=1, eos_token_id=2)
SERVE = ["--device", "cpu", "--dtype", "float32", "--max-total-tokens", "4096", "--max-running-requests", "16"]
RANKS = ["--tp", "2", "--dp-size", "2", "--enable-dp-attention"]
PAIRS = ["--tp", "4", "--dp-size", "2", "--enable-dp-attention"]  # two ranks share the attention of one request
ADAPTIVE = ["--spec", "adaptive", "--candidate-steps", "0,1,2,3"]
STEPS = (OFF, *map(SpecConfig, (1, 2, 3)))
# Off, 1, 2 and 3 steps in turn, by batch and by context.
TURNS = SpecSchedule(
    (1, 2, 5), (0, *range(6, 360, 6)), tuple(tuple(STEPS[(i + j) % 4] for j in range(60)) for i in range(3))
)


def environment(**more: str) -> dict[str, str]:
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    return {"OMP_NUM_THREADS": "1", "SGLANG_CPU_OMP_THREADS_BIND": "|".join([cores] * 4), **more}


def recording(model: Path, folder: Path, ranks: list[str] = RANKS, **more: str) -> EngineProcess:
    """Start an adaptive engine whose ranks record their decisions in `folder`."""
    port = free_port(ENGINES)
    folder.mkdir()
    command = [sys.executable, str(Path(__file__).with_name("ranks_serve.py")), str(folder), "--model", str(model)]
    with (folder / "log").open("wb") as output:
        process = subprocess.Popen(
            [*command, "--port", str(port), *SERVE, *ranks, *ADAPTIVE],
            env=os.environ | environment(**more), stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    scratch = Path(tempfile.mkdtemp())
    return EngineProcess(process, f"http://127.0.0.1:{port}", folder / "log", scratch, api_key="")


def decisions(folder: Path, names: str = "01") -> list[list[list]]:
    """Return the lines of these ranks, as far as all have them."""
    ranks = [[json.loads(line) for line in (folder / name).read_text().splitlines()] for name in names]
    rounds = min(map(len, ranks))
    return [lines[:rounds] for lines in ranks]


def asked(n: int, tokens: int = 40) -> tuple[list[Request], Sampling]:
    requests = [Request(f"r{i}.", Prompt(i, np.arange(3, 6 + i % 5)), seed=i) for i in range(n)]
    return requests, Sampling(temperature=0.8, max_new_tokens=tokens, ignore_eos=True)


def texts(engine: SGLangEngine, n: int, tokens: int = 40) -> list[list[int]]:
    return [sample.tokens.tolist() for sample in engine.generate(*asked(n, tokens))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("ranks")
    tensors = checkpoint(CONFIG, folder / "names")
    write_hf(folder / "model", CONFIG, {name: tensor.clone() for name, tensor in tensors.items()})
    return folder / "model", tensors


@pytest.fixture(scope="module")
def plain(model, tmp_path_factory):
    """Texts without speculation: of the first weights by number of samples, and of six samples after a push."""
    log = tmp_path_factory.mktemp("plain") / "log"
    with launch(model[0], log, arguments=[*SERVE, *RANKS, "--spec", "off"], environment=environment()) as process:
        engine = SGLangEngine.of(process.wait(300), timeout=120)
        found = {n: texts(engine, n) for n in (1, 3, 6)} | {"long": texts(engine, 6, 160)}
        engine.update_weights(1, agreeing(model[1], CONFIG).items())
        return found | {"pushed": texts(engine, 6)}


@pytest.mark.slow  # starts two engines of two ranks
def test_ranks_decide_together_and_texts_stay_equal(model, plain, tmp_path):
    folder = tmp_path / "decided"
    with recording(model[0], folder) as process:
        engine = SGLangEngine.of(process.wait(300), timeout=120)
        engine.set_schedule(TURNS)
        for n in (6, 1, 3):  # of one sample, the other rank has none
            assert texts(engine, n) == plain[n]
        steps = {line[0] for line in decisions(folder)[0]}
        assert steps == {-1, 1, 2, 3}
        idle = [line for line in decisions(folder)[1] if line[5] == 0]
        assert {line[0] for line in idle} == steps and {line[2] for line in idle} == {1}

        rounds = engine.stats()
        assert {r.batch for r in rounds} >= {1, 3, 6} and {r.config for r in rounds} == set(STEPS)

        engine.hold("test")
        assert texts(engine, 3) == plain[3] and {r.config for r in engine.stats()} == {OFF}
        engine.release()

        rule = {"candidates": [[0, 0, 0], [3, 1, 4]], "start": [0, 0, 0], "probe_share": 0.3}
        engine.set_spec_rule(rule | {"roofline": Roofline(0.0, 1 / 32, 1 / 1000, 0.1).to_json()})
        begun = len(decisions(folder)[0])
        assert texts(engine, 6, 160) == plain["long"]
        ruled = [line for lines in decisions(folder) for line in lines[begun:]]
        assert any(line[7] is not None for line in ruled), "no probe let a part of the requests catch up"
        assert len({tuple(line[4]) for line in ruled}) > 1, "the rule learnt nothing"

        abort_one(engine)
        engine.set_schedule(TURNS)
        pusher = Pusher({"e": engine})
        good = agreeing(model[1], CONFIG)
        assert not pusher.push(1, lambda scope: good.items()).failed
        engine.stats()
        assert texts(engine, 6) == plain["pushed"]
        assert sum(sum(n * i for i, n in enumerate(r.accepted)) for r in engine.stats()) > 20
    zero, one = ([line[:5] for line in lines] for lines in decisions(folder))
    assert zero == one and len(zero) > 100


def abort_one(engine: SGLangEngine) -> None:
    """Abort one of four samples while they are drawn, and see the others end as usual."""
    requests, sampling = asked(4, 240)
    found = []
    thread = threading.Thread(target=lambda: found.extend(engine.generate(requests, sampling)))
    thread.start()
    while not engine.stats():
        time.sleep(0.05)
    engine.abort([requests[1].id])
    thread.join(100)
    assert [sample.status for sample in found] == ["truncated", "aborted", "truncated", "truncated"]


@pytest.mark.slow  # starts an engine of four ranks
def test_pairs_of_ranks_with_the_same_requests_decide_together(model, tmp_path):
    """Attention is split over two ranks for each half of the requests: tensor parallelism 4, data parallelism 2."""
    folder = tmp_path / "pairs"
    with recording(model[0], folder, PAIRS) as process:
        engine = SGLangEngine.of(process.wait(300), timeout=120)
        engine.hold("test")
        without = {n: texts(engine, n) for n in (6, 1)}
        assert {r.config for r in engine.stats()} == {OFF}
        engine.release()
        begun = len(decisions(folder)[0])
        engine.set_schedule(TURNS)
        for n in (6, 1):  # of one sample, two ranks have none
            assert texts(engine, n) == without[n]
    ranks = [[line[:5] for line in lines] for lines in decisions(folder, "0123")]
    assert ranks.count(ranks[0]) == 4 and {line[0] for line in ranks[0][begun:]} == {-1, 1, 2, 3}


@pytest.mark.slow  # starts an engine of two ranks
def test_ranks_that_do_not_exchange_decide_differently(model, tmp_path):
    """The control: of three samples two are on one rank, and the schedule goes by the batch. The engine may hang."""
    folder = tmp_path / "apart"
    with recording(model[0], folder, APART="1") as process:
        engine = SGLangEngine.of(process.wait(300), timeout=120)
        engine.set_schedule(SpecSchedule((1, 2), (0,), ((SpecConfig(1),), (SpecConfig(3),))))

        def draw() -> None:
            with pytest.raises(EngineError):
                engine.generate(*asked(3))

        thread = threading.Thread(target=draw, daemon=True)
        thread.start()
        until = time.monotonic() + 60
        while time.monotonic() < until and not (
            all((folder / name).is_file() for name in "01") and any(decisions(folder))
        ):
            time.sleep(0.2)
        zero, one = decisions(folder)
        assert zero[0][0] != one[0][0]
