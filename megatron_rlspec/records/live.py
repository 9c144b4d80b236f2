"""One line for each step of a run, on the terminal of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_rlspec.texts import printable

# Key of a record -> the name shown for it, and its format.
SHOWN = {
    "rollout/reward": ("reward", "{:.3f}"),
    "rollout/failed_rewards": ("failed rewards", "{:.0f}"),
    "rollout/accept_length": ("accept length", "{:.2f}"),
    "rollout/tokens_per_second": ("tokens/s", "{:.0f}"),
    "rollout/response_length": ("response length", "{:.0f}"),
    "rollout/truncated": ("truncated", "{:.0%}"),
    "rollout/size_changes": ("size changes", "{:.0f}"),
    "drafter/match_1": ("drafter agreement", "{:.2f}"),
    "policy/loss": ("loss", "{:.3f}"),
    "drafter/loss_1": ("loss of draft 1", "{:.3f}"),
    "seconds_generate": ("generate", "{:.2f} s"),
    "seconds_train": ("train", "{:.2f} s"),
    "seconds_push": ("push", "{:.2f} s"),
}
CLEAR = 0.05  # of the decoding time: costs of rounds are not known better
Numbers = Mapping[str, float]


def line(step: int, total: int, values: Numbers) -> str:
    """Return one step as a line of text."""
    parts = [f"step {step + 1}/{total}"]
    for key, (name, style) in SHOWN.items():
        if key in values:
            parts.append(f"{name} {style.format(values[key])}")
    shares = configs(values)
    if shares:
        parts.append(shares)
    return "  ".join(parts)


def saved_line(records: Sequence[Numbers]) -> str:
    """Return what speculation saved in a run, from the records of its steps; "" if no step says."""
    drafted = [values for values in records if "spec/verified_tokens" in values]
    estimated = [values for values in drafted if "spec/saved_seconds" in values]
    if not estimated:
        return ""
    saved = sum(values["spec/saved_seconds"] for values in estimated)
    spent = sum(values["spec/rounds"] * values["spec/ms_per_round"] for values in estimated) / 1e3
    if abs(saved) < CLEAR * spent:
        effect = "neither saved nor cost a clear part of the engines' decoding"
    elif saved >= 0:
        effect = f"saved about {saved:.1f} s of the engines' decoding"
    else:
        effect = f"cost about {-saved:.1f} s of the engines' decoding"
    steps = ""
    if len(estimated) < len(drafted):
        steps = f"in {len(estimated)} of the {len(drafted)} steps with drafts, "
    return (
        f"{steps}speculation {effect}: {spent:.1f} s with drafts, about {spent + saved:.1f} s without. This is "
        "an estimate from its rounds and their costs; prefill, and training and pushing the drafter, are not counted"
    )


def configs(values: Numbers) -> str:
    """Return each configuration's share of the decode rounds, the largest first: "k3 84%, off 16%"."""
    prefix = "spec/share_"
    shares = []
    for key, share in values.items():
        if key.startswith(prefix) and share > 0:
            shares.append((share, key.removeprefix(prefix)))
    shares.sort(key=lambda pair: -pair[0])
    return printable(", ".join(f"{name} {share:.0%}" for share, name in shares))
