import io
import math
from datetime import timedelta

import pytest
from rich.console import Console

from megatron_rlspec.records.live import View, curve, line, panel

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


def test_without_a_terminal_a_step_is_one_line():
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


FULL = RECORD | {
    "rollout/response_length": 812.0,
    "drafter/match_1": 0.91,
    "policy/loss": -0.0123,
    "drafter/loss_1": 1.234,
    "seconds_generate": 123.456,
    "seconds_train": 45.67,
    "seconds_push": 8.9,
    "spec/share_k1": 0.1,
}
EVENT = "[health] engine-1: drop: " + "a long reason " * 12


@pytest.mark.parametrize("width", [60, 80, 110, 160, 200])
def test_every_row_is_a_line_of_its_own_at_any_width(width):
    console = Console(width=width, record=True, file=io.StringIO())
    history = [FULL | {"rollout/reward": 0.01 * i} for i in range(60)]
    console.print(panel(59, 90, timedelta(seconds=4000), history, [EVENT, "[reward] short"], console.width))
    lines = console.export_text().splitlines()
    assert {len(text) for text in lines} == {width}
    top, bar, *rows, bottom = lines
    assert "step 60 of 90, 1:06:40 left" in top and set(bar) <= set("│ ━╸╺")
    names = ["reward", "accept length", "tokens/s", "response length", "drafter agreement", "loss", "loss of draft 1"]
    names += ["configurations", "seconds", "event", "event"]
    assert [row[2:19].strip() for row in rows] == names
    values = ["0.590", "2.25", "1234", "812", "0.91", "-0.012", "1.234"]
    assert [row[21:29].strip() for row in rows[:7]] == values
    curves = [row[31:].rstrip("│ ") for row in rows[:7]]
    assert {len(drawn) for drawn in curves} == {min(60, width - 33)} and curves[0].endswith("█")
    assert rows[7][21:].startswith("k3 75%, off 25%, k1 10%")
    for part, exact in (("generate", "123.46"), ("train", "45.67"), ("push", "8.90")):
        assert f"{part} {exact} s" in rows[8] or f"{part} {float(exact):.0f} s" in rows[8], rows[8]
    assert ("█" in rows[8]) == (width > 60)
    assert rows[9][21:].startswith("[health] engine-1: drop: a long") and "…" in rows[9]
    assert rows[10][21:].startswith("[reward] short")


def test_the_panel_of_a_view_has_its_console_s_width():
    out = io.StringIO()
    console = Console(file=out, width=60, force_terminal=True, color_system=None, legacy_windows=False)
    with View(3, 0, [], console) as view:
        view.update(0, FULL)
    assert "│ reward             0.500" in out.getvalue()


@pytest.mark.parametrize("width", [32, 34, 36, 40, 50])
def test_a_narrow_panel_keeps_names_and_values(width):
    console = Console(width=width, record=True, file=io.StringIO())
    history = [FULL | {"rollout/reward": 0.01 * i} for i in range(60)]
    console.print(panel(59, 90, timedelta(seconds=4000), history, [EVENT], console.width, "last record 3 min ago"))
    lines = console.export_text().splitlines()
    assert {len(text) for text in lines} == {width} and "3 min ago" in lines[-1]
    assert [row[21:29].strip() for row in lines[2:9]] == ["0.590", "2.25", "1234", "812", "0.91", "-0.012", "1.234"]
    assert ("█" in lines[2]) == (width >= 37)


@pytest.mark.parametrize("terminal", [{"width": 31}, {"width": 80, "_environ": {"TERM": "dumb"}}])
def test_a_terminal_that_can_show_no_panel_gets_lines(terminal):
    out = io.StringIO()
    with View(3, 0, [], Console(file=out, force_terminal=True, legacy_windows=False, **terminal)) as view:
        view.update(0, FULL)
    assert "step 1/3  reward 0.500" in out.getvalue().replace("\n", "") and "╭" not in out.getvalue()


@pytest.mark.parametrize("environment", [{}, {"NO_COLOR": "1"}])
def test_no_color_is_respected(environment):
    out = io.StringIO()
    environment = {"TERM": "xterm-256color", **environment}
    console = Console(file=out, width=80, force_terminal=True, legacy_windows=False, _environ=environment)
    with View(3, 0, ["[health] engine-1: drop"], console) as view:
        view.update(0, FULL)
    assert ("\x1b[32m" in out.getvalue() or "\x1b[33m" in out.getvalue()) == ("NO_COLOR" not in environment)
