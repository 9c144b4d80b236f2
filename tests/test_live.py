import io
import math
from datetime import timedelta

from rich.console import Console

from megatron_rlspec.live import View, curve, line, panel

RECORD = {
    "rollout/reward": 0.5,
    "rollout/accept_length": 2.25,
    "rollout/tokens_per_second": 1234.4,
    "spec/share_k3": 0.75,
    "spec/share_off": 0.25,
    "spec/share_k5": 0.0,
    "seconds_generate": 3.0,
    "seconds_train": 1.0,
}


def test_anywhere_but_on_a_terminal_a_step_is_one_line():
    out = io.StringIO()
    with View(30, 4, [], Console(file=out, width=20)) as view:
        view.update(4, RECORD)
        view.update(5, RECORD | {"rollout/reward": math.nan})
    first, second = out.getvalue().splitlines()
    assert first == line(4, 30, RECORD)
    assert first.startswith("step 5/30  reward 0.500  accept length 2.25  tokens/s 1234  k3 75%, off 25%")
    assert first.endswith("generate 3.00 s, train 1.00 s") and second.startswith("step 6/30  reward nan")


def test_on_a_terminal_everything_is_seen_at_once():
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True, color_system=None, legacy_windows=False)
    events: list[str] = []
    with View(30, 0, events, console) as view:
        view.update(0, RECORD)
        events.append("[health] engine-1: drop")
        view.update(1, RECORD | {"rollout/reward": 1.0})
    last = out.getvalue()[out.getvalue().rindex("step 2 of 30") :]
    for part in ("1.000", "▁█", "2.25", "k3 75%, off 25%", "generate 3.00 s", "█" * 20, "[health] engine-1: drop"):
        assert part in last, (part, last)


def test_a_panel_of_a_warm_start_has_no_rollout():
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(panel(2, 9, timedelta(seconds=70), [{"policy/loss": 1.5, "seconds_train": 0.5}], []))
    text = console.export_text()
    assert "step 3 of 9, 0:01:10 left" in text and "1.500" in text and "reward" not in text


def test_curve_leaves_out_what_is_not_there():
    assert curve([0.0, math.nan, 1.0]) == "▁ █" and curve([2.0, 2.0]) == "▁▁" and curve([]) == ""
