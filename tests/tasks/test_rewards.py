"""Rewards by every name, and what must not stop a run: rewards that raise, hang, die, print or answer nonsense."""

import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

from megatron_rlspec.config import ConfigError, RewardConfig
from megatron_rlspec.records import metric_names
from megatron_rlspec.records.recorder import Recorder, read_records
from megatron_rlspec.run.summaries import rollout_metrics
from megatron_rlspec.tasks import reward_worker
from megatron_rlspec.tasks.reward_worker import final_answer
from megatron_rlspec.tasks.rewards import Scorer, Scoring, failed
from megatron_rlspec.types import Prompt, Sample

FUNCTIONS = """
import os, sys, time
def length(prompt, response, label, metadata):
    print("rewards may print,", end="")
    os.write(1, b"even past Python\\n")
    return len(response) + len(prompt) * metadata.get("scale", 0)
def awkward(prompt, response, label, metadata):
    if response == "raise": raise RuntimeError("no such\\nluck")
    if response == "hang": time.sleep(3600)
    if response == "exit": sys.exit(3)
    if response == "die": os._exit(4)
    if response == "nan": return float("nan")
    if response == "none": return None
    return len(response) > 2
def parts(prompt, response, label, metadata, response_tokens, truncated):
    return {"reward": 1.5 - truncated, "tokens": sum(response_tokens), "format": not truncated}
def pid(prompt, response, label, metadata):
    "Waits until as many processes are here as the sample says."
    open(f"here-{os.getpid()}", "w").close()
    while sum(name.startswith("here-") for name in os.listdir()) < metadata["processes"]: time.sleep(0.01)
    return os.getpid()
def lasts(prompt, response, label, metadata):
    time.sleep(0.1)
    open(f"ended-{label}", "w").close()
    return 1
"""


@pytest.fixture
def functions(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)


def sample(text: str, label: str = "", number: int = 0, **metadata) -> Sample:
    tokens = np.arange(4)
    prompt = Prompt(number, tokens[:2], label=label, text="prompt", metadata=metadata)
    return Sample(f"r{number}", prompt, tokens, np.ones(4, np.float32), np.zeros(4, np.float32), text=text)


def score(kind: str, samples: list[Sample], **options) -> tuple[list[float], list[str]]:
    with Scorer(RewardConfig(kind=kind, **options)) as scorer:
        failures = scorer.score(samples)
    return [s.reward for s in samples], failures


@pytest.mark.parametrize(
    ("text", "label", "reward"),
    [
        ("k3=3,l9=2,#2", "2", 1),
        ("the sum is 72\n#### 72\n", "She sold 24 more.\n#### 72", 1),
        (" 7 ", "7", 1),
        ("#7", "C#7", 1),  # only the final answer counts
        ("no idea #", "", 0),  # nothing after the last # is no answer
        ("So: #Paris", '["paris", "Paris"]', 1),
        ("Rome", '["paris", "Paris"]', 0),
    ],
)
def test_exact(text, label, reward):
    assert score("exact", [sample(text, label)]) == ([reward], [])


def test_math():
    cases = [
        ("So it is $\\frac{2}{4}$.", "0.5", 1),
        ("thus \\boxed{x^2 + 2x + 1}", "$(x+1)^2$", 1),
        ("#### 1,234", "She has 1234.\n#### 1234", 1),
        ("5 apples, so #### 6", "#### 5", 0),
        ("the pair is $(1, 2)$", "(1, 2)", 1),
        ("\\boxed{4}", '["3", "4"]', 1),
    ]
    samples = [sample(text, label) for text, label, _ in cases]
    rewards, (failure,) = score("math", [*samples, sample("1", "")], workers=1)
    assert rewards == [*(reward for *_, reward in cases), 0]
    assert "is no mathematical expression" in failure


def test_function_gets_the_sample_and_may_print(functions):
    samples = [sample("x" * n, number=n, scale=n % 2) for n in range(20)]
    rewards, failures = score("my_rewards:length", samples, workers=3)
    assert not failures
    assert rewards == [n + 6 * (n % 2) for n in range(20)]


OURS = ("std", "seconds_waited")  # `rollout/reward_NAME` is a metric of ours


def test_a_reward_may_see_tokens_and_return_parts(functions):
    samples = [sample("yes", number=i) for i in range(2)]
    samples[1].status = "truncated"
    rewards, failures = score("my_rewards:parts", samples, workers=1)
    assert not failures and rewards == [1.5, 0.5]
    found = rollout_metrics(samples)
    assert (found["reward"], found["reward_tokens"], found["reward_format"]) == (1.0, 5.0, 0.5)
    assert metric_names.find("rollout/reward_format").key == "rollout/reward_<part>"
    for name, wrong in (("", {"format": 1.0}), *((name, {"reward": 1.0, name: 1.0}) for name in OURS)):
        with pytest.raises(ValueError, match=f"{name}.*expected"):
            reward_worker.parts_of(wrong)


POOL = """
from concurrent.futures import ProcessPoolExecutor
from beside import FACTOR
def double(text):
    return FACTOR * len(text)
def score(prompt, response, label, metadata):
    with ProcessPoolExecutor(1) as pool:
        return pool.submit(double, response).result(30)
"""


def test_a_function_can_be_given_by_its_file_which_may_have_any_name_and_start_processes(functions, tmp_path):
    (tmp_path / "rewards").mkdir()
    (tmp_path / "rewards/math.py").write_text(POOL)
    (tmp_path / "rewards/beside.py").write_text("FACTOR = 2")
    for file in ("rewards/math.py", str(tmp_path / "rewards/math.py")):
        assert score(f"{file}:score", [sample("abc")], workers=1) == ([6], [])
    with pytest.raises(ConfigError, match="no.py"):
        score("rewards/no.py:score", [], workers=1)


def test_a_function_can_be_given_from_python():
    assert RewardConfig(kind=final_answer).kind == "megatron_rlspec.tasks.reward_worker:final_answer"
    with pytest.raises(ValueError, match="a function at the top of a module"):
        RewardConfig(kind=lambda **_: 1.0)


def test_what_goes_wrong_is_marked_and_the_others_are_judged(functions):
    texts = ["fine", "raise", "ok", "hang", "exit", "fine", "die", "nan", "none", "fine"]
    samples = [sample(text, number=i) for i, text in enumerate(texts)]
    rewards, failures = score("my_rewards:awkward", samples, workers=1, timeout_seconds=4)
    assert rewards == [1, 0, 0, 0, 0, 1, 0, 0, 0, 1]
    assert [i for i, s in enumerate(samples) if failed(s)] == [1, 3, 4, 6, 7, 8]
    assert failures == [
        "r1: RuntimeError: no such luck",
        "r3: no answer within 4 s",
        "r4: the reward's process ended with exit code 3",
        "r6: the reward's process ended with exit code 4",
        "r7: ValueError: reward is nan, expected one finite number",
        "r8: ValueError: reward is None, expected one finite number",
    ]


def test_numbers_of_other_libraries_are_rewards():
    values = [True, 2, 0.5, np.float32(0.5), np.int64(3), np.bool_(True), np.array([0.25])]
    assert [reward_worker.number(value) for value in values] == [1, 2, 0.5, 0.5, 3, 1, 0.25]


def test_failed_rewards_enter_no_mean_and_are_marked_in_the_record(tmp_path):
    samples = [sample("x" * n, number=n) for n in range(8)]
    for one in samples:
        one.reward = -1.0
    for one in samples[::2]:
        one.reward, one.metadata["reward_error"] = 0.0, "ValueError: odd"
    found = rollout_metrics(samples)
    assert (found["reward"], found["reward_std"], found["failed_rewards"]) == (-1, 0, 4)
    assert not {"reward", "reward_std"} & set(rollout_metrics(samples[::2]))
    Recorder(tmp_path).samples(0, samples[:2], str)
    rows = read_records(tmp_path / "samples.jsonl")
    assert [(row["reward"], row.get("reward_error")) for row in rows] == [(None, "ValueError: odd"), (-1.0, None)]


def test_rewards_run_at_the_same_time(functions):
    rewards, failures = score("my_rewards:pid", [sample("", number=i, processes=4) for i in range(8)], workers=4)
    assert not failures and len(set(rewards)) == 4


def test_rewards_begin_when_their_sample_ends(functions, tmp_path):
    """A reward takes 0.1 s at least. Four samples end while others are drawn; only the last reward is waited for."""
    samples = [sample("", label=str(i), number=i) for i in range(5)]
    with Scorer(RewardConfig(kind="my_rewards:lasts", workers=1)) as scorer:
        scoring = Scoring(scorer)
        for one in samples[:4]:
            scoring.add(one)
        wait_until(lambda: len(list(tmp_path.glob("ended-*"))) == 4)
        assert not scoring.finish(samples)
        late = Scoring(scorer)
        assert not late.finish(samples)
    assert all(one.reward == 1 for one in samples)
    assert late.waited > 0.5


def test_worker_starts_without_heavy_imports():
    code = "import sys, megatron_rlspec.tasks.reward_worker; print({'torch', 'numpy', 'pydantic'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


# ---- what a reward's own processes and writes must not do -----------------------------------------------------------

PROCESSES = """
import os, subprocess, sys, time
def forks(prompt, response, label, metadata):
    "Both processes return, the child first and with another value."
    if os.fork() == 0:
        return 111
    time.sleep(0.05)
    return float(response)
def writes_everywhere(prompt, response, label, metadata):
    for fd in range(3, 64):
        for text in (b'{"reward": 111}', b'{"id": "started", "reward": 111}\\n', b"junk", b"[1]"):
            try: os.write(fd, text)
            except OSError: pass
    return float(response)
def hangs_with_children(prompt, response, label, metadata):
    if response == "fine": return 1
    sleep = [sys.executable, "-c", "import time; time.sleep(3600)", metadata["mark"]]
    subprocess.Popen(sleep)
    if os.fork() == 0:
        os.execv(sleep[0], sleep)
    if response == "die": os.kill(os.getpid(), 9)
    time.sleep(3600)
def positional(prompt, response, label, metadata, /): return 1
def too_many(prompt, response, label, metadata, tokenizer): return 1
"""


@pytest.fixture
def processes(tmp_path, monkeypatch):
    (tmp_path / "busy_rewards.py").write_text(PROCESSES)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("function", ["forks", "writes_everywhere"])
def test_no_reward_becomes_that_of_another_sample(processes, function):
    samples = [sample(f"{n / 4}", number=n) for n in range(12)]
    rewards, failures = score(f"busy_rewards:{function}", samples, workers=1, timeout_seconds=60)
    assert not failures
    assert rewards == [n / 4 for n in range(12)]


def marked(mark: str) -> list[int]:
    return [p.pid for p in psutil.process_iter(["cmdline"]) if mark in (p.info["cmdline"] or [])]


def test_a_reward_is_ended_with_everything_that_it_started(processes):
    mark = f"mark-die-{time.monotonic_ns()}"
    samples = [sample(text, number=i, mark=mark) for i, text in enumerate(["die", "fine"])]
    with Scorer(RewardConfig(kind="busy_rewards:hangs_with_children", workers=1, timeout_seconds=4)) as scorer:
        failures = scorer.score(samples)
        assert marked(mark) == []
    assert len(failures) == 1 and samples[1].reward == 1


def test_nothing_is_left_when_the_trainer_is_killed(processes):
    mark = f"mark-trainer-{time.monotonic_ns()}"
    code = f"""
from megatron_rlspec.config import RewardConfig
from megatron_rlspec.tasks.rewards import Scorer
from megatron_rlspec.types import Prompt, Sample
import numpy as np
prompt = Prompt(0, np.arange(2), metadata={{"mark": {mark!r}}})
samples = [Sample(f"r{{i}}", prompt, np.arange(4), np.ones(4), np.zeros(4), text="hang") for i in range(2)]
Scorer(RewardConfig(kind="busy_rewards:hangs_with_children", workers=2)).score(samples)
"""
    trainer = subprocess.Popen([sys.executable, "-c", code])
    wait_until(lambda: len(marked(mark)) == 4)
    children = psutil.Process(trainer.pid).children(recursive=True)
    trainer.kill()
    trainer.wait()
    wait_until(lambda: not marked(mark) and not any(p.is_running() for p in children))


def wait_until(done, seconds=120):
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("positional", "positional(prompt, response, label, metadata, /): "),
        ("too_many", "missing a required argument: 'tokenizer'; expected too_many(prompt: str, response: str, label:"),
    ],
)
def test_a_wrong_signature_is_refused_before_the_first_sample(processes, function, expected):
    with pytest.raises(ConfigError) as told:
        Scorer(RewardConfig(kind=f"busy_rewards:{function}", workers=1))
    assert expected in str(told.value) and "\n" not in str(told.value)
