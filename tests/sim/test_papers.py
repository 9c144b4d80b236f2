"""The papers' figures from their own inputs: the page is what the code computes, and hand calculations agree."""

from pathlib import Path

import pytest

from megatron_rlspec.sim import papers


@pytest.mark.slow
def test_the_page_is_up_to_date():
    page = Path(__file__).parents[2] / "docs" / "papers.md"
    assert page.read_text().startswith(papers.page()), "run python -m megatron_rlspec.sim.papers > docs/papers.md"


def test_gains_follow_from_pats_figure_4():
    """An independent script gave 1.03, 1.07, 1.14 and 1.18, and 8.3 GB/s."""
    assert list(papers.pat_step_gains(0.73).values()) == pytest.approx([1.03, 1.07, 1.14, 1.18], abs=0.01)
    assert papers.PatMachine().bus / 1e9 == pytest.approx(8.3, abs=0.05)
    over_all, slowest = papers.pat_alone()
    assert over_all < 0.05 and slowest < 0.16


def test_the_machine_gives_back_its_anchors():
    machine = papers.PatMachine()
    for tp, batch in ((2, 1), (8, 1)):
        assert machine.round_ms(tp, batch, 0.0) == pytest.approx(papers.PAT_MS[tp, batch], rel=0.02)
    slower = machine.round_ms(8, 128, 0.0) - machine.round_ms(2, 32, 0.0)
    assert slower == pytest.approx(papers.PAT_MS[8, 128] - papers.PAT_MS[2, 128], abs=0.3)


def test_amdahls_law_in_three_directions():
    assert papers.amdahl(0.684, 2.10) == pytest.approx(1.56, abs=0.005)
    assert papers.share_for(papers.amdahl(0.6, 3.0), 3.0) == pytest.approx(0.6)
    assert papers.part_for(papers.amdahl(0.6, 3.0), 0.6) == pytest.approx(3.0)
    assert papers.part_for(4.53, 0.86) == pytest.approx(10.7, abs=0.1)
