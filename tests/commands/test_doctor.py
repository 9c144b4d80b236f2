"""The doctor's decisions: what a run needs, what is refused, and what its report says."""

import pytest

from megatron_rlspec.commands import doctor
from megatron_rlspec.config import ConfigError


def test_what_is_installed_fits_and_another_version_differs(monkeypatch):
    assert [f.state for f in doctor.examine(["megatron-core", "sglang"])] == ["fits", "fits"]
    monkeypatch.setattr(doctor, "version", lambda name: "0.5.20")
    (sglang,) = doctor.examine(["sglang"])
    assert sglang.state == "differs"
    assert sglang.text.startswith("0.5.20 is installed; install sglang 0.5.15.post1 to 0.5.19 or 0.5.23")


@pytest.mark.parametrize(("state", "says"), [("missing", "not installed"), ("differs", "does not fit the installed")])
def test_a_run_is_refused_because_of_what_it_needs_only(state, says, monkeypatch):
    monkeypatch.setattr(
        doctor,
        "examine",
        lambda names: [doctor.ProjectLine(n, state if n == "sglang" else "fits", "x is gone") for n in names],
    )
    with pytest.raises(ConfigError, match=says) as refused:
        doctor.refuse_if_affected(starts_sglang=True)
    assert 'rollout.engine="sglang"' in str(refused.value)
    doctor.refuse_if_affected(starts_sglang=False)
