"""Measure an index of old answers beside the drafter in rounds of equal size, behind the check (docs/history.md).

    python benchmarks/history_choice.py days=RUN_DIR [NAME=RUN_DIR ...] [--steps 5] [--drafter DIR]

A RUN_DIR is as for `history_rollouts.py`. Each of the last steps is generated again under its own policy and seeds, in
rounds that commit one token. So it is known at every position how many drafts of the drafter are accepted. Rounds of
SGLang's engine are then followed on the texts: the check, a prefill that draws one token, and rounds in which each
sample has n drafts, all of the drafter or all of the index.

    checked   the drafter's
    index     of the source that was accepted more often at matches of that length (`Sources`), since the last push
    kept      the same, since the start
    late      as `kept`, under the overlap scheduler: the host knows the tokens before the last round, looks up what
              follows these, and the device drops what the last round generated, or all drafts if that differs
    bound     of the source that is right longer in this round

Controls are `drafter` and `alone`: `checked` and `kept` without the check. Intervals are 95 % bootstrap intervals over
prompts. Speed does not matter.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from history import gain, one_token_a_round, runs
from history_rollouts import Rerun

from megatron_rlspec.commands.compare import estimate
from megatron_rlspec.speculation.history import LONGEST, START, Sources, Texts
from megatron_rlspec.types import Request, Sample

CHECKED = ("checked", "index", "kept", "late", "bound")
WAYS = ("drafter", "alone", *CHECKED)
DRAFTS = (3, 5, 8)


class Answer:
    """One answer, and where its rounds are.

    text [N]   its tokens
    right [N]  drafts of the drafter that a round beginning at a token has accepted
    """

    def __init__(self, prompt: int, text: np.ndarray, right: np.ndarray, draft: np.ndarray) -> None:
        self.prompt, self.text, self.right = prompt, text, right
        both = min(len(draft), len(text))
        differ = np.flatnonzero(draft[:both] != text[:both])
        held = int(differ[0]) + 1 if len(differ) else both
        self.known = held  # tokens that the host knows
        self.at = held + 1  # tokens that are generated; a prefill draws one behind the check

    def offer(self, texts: Texts, drafts: int, late: bool) -> tuple[int, int]:
        """Return the length of the match in old answers, 0 if there is none, and how many drafts from it are right."""
        known = self.known if late else self.at
        end = self.text[max(0, known - LONGEST) : known]
        if known < LONGEST:
            end = np.concatenate([[START], end])
        match, found = texts.follow(end, drafts + self.at - known)
        new = self.text[known : self.at]
        if len(found) <= len(new) or (found[: len(new)] != new).any():
            return 0, 0
        found = found[len(new) :]
        ahead = self.text[self.at : self.at + len(found)]
        differ = np.flatnonzero(ahead != found[: len(ahead)])
        return min(match + len(new), LONGEST + 1), int(differ[0]) if len(differ) else len(ahead)


def rounds(answers: Sequence[Answer], old: dict[int, Texts], way: str, drafts: int, sources: Sources) -> np.ndarray:
    """Follow the rounds of a step's answers, all at once. Returns [answers, 2]: rounds, tokens beyond one a round."""
    found = np.zeros((len(answers), 2), np.int64)
    going = [i for i, one in enumerate(answers) if one.at < len(one.text)]
    while going:
        learnt = []
        for i in going:
            one = answers[i]
            right = min(int(one.right[one.at]), drafts)
            if way not in ("drafter", "checked"):
                match, history = one.offer(old[one.prompt], drafts, way == "late")
                if way == "bound":
                    right = max(right, history)
                elif match:
                    chosen = sources.history(match)
                    right = history if chosen else right
                    learnt.append((match, chosen, right))
            more = min(right, len(one.text) - one.at - 1)
            found[i] += 1, more
            one.known, one.at = one.at, one.at + 1 + more
        for observed in learnt:
            sources.observe(*observed)
        ended = [i for i in going if answers[i].at >= len(answers[i].text)]
        for i in ended:
            old[answers[i].prompt].add(answers[i].text)
        going = [i for i in going if i not in ended]
    return found


def measure(run_dir: Path, steps: int, drafter: Path | None) -> dict[tuple[int, str], list[np.ndarray]]:
    """Return, of each number of drafts and way, for each step [prompts, 2]: rounds, tokens beyond one a round."""
    run = Rerun(run_dir, drafter, max(DRAFTS), steps)
    found: dict[tuple[int, str], list[np.ndarray]] = {(drafts, way): [] for drafts in DRAFTS for way in WAYS}
    sources = {key: Sources() for key in found}
    for groups in run.steps():
        run.push()
        asked = []
        for group in groups:
            for i, sample in enumerate(group.samples):
                asked.append(Request(f"{group.prompt.id:07d}-{i:04d}", group.prompt, sample.seed or 0))
        with one_token_a_round(run.engine) as accepted:
            samples = run.engine.generate(asked, run.sampling)
        _, prompts = np.unique([sample.prompt.id for sample in samples], return_inverse=True)
        for (drafts, way), parts in found.items():
            answers = [begun(sample, accepted, run, way in CHECKED) for sample in samples]
            texts = {group.prompt.id: Texts(run.answers.of(group.prompt.id).values()) for group in groups}
            if way == "index":
                sources[drafts, way] = Sources()
            parts.append(np.zeros((len(groups), 2), np.int64))
            np.add.at(parts[-1], prompts, rounds(answers, texts, way, drafts, sources[drafts, way]))
    return found


def begun(sample: Sample, accepted: Mapping[tuple[int, int], int], run: Rerun, checked: bool) -> Answer:
    """Return an answer before its first round. `accepted`: drafts of the drafter, by (seed, position)."""
    places = range(sample.prompt_len, len(sample.tokens))
    right = np.array([accepted.get((sample.seed or 0, at), 0) for at in places], np.int64)
    draft = run.draft(sample.prompt.id, sample.seed) if checked else np.zeros(0, np.int64)
    return Answer(sample.prompt.id, sample.response, right, draft)


def main(argv: Sequence[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("runs", nargs="+", metavar="NAME=RUN_DIR")
    p.add_argument("--steps", type=int, default=5, help="the last ones of each run; default: 5")
    p.add_argument("--drafter", type=Path, metavar="DIR", help="a model's directory; default: the run's `hf`")
    options = p.parse_args(argv)
    torch.set_num_threads(1)
    for name, run_dir in runs(options.runs):
        found = measure(run_dir, options.steps, options.drafter)
        for (drafts, way), parts in found.items():
            counts = np.concatenate(parts)
            base = np.concatenate(found[drafts, "checked" if way in CHECKED else "drafter"])
            length, more = estimate(counts).value, gain(counts, base)
            print(
                f"{name}, {drafts} drafts, {way:8}: {length:.2f} tokens a round, {more.value:+.1%} [{more.low:.1%}, "
                f"{more.high:.1%}]; {counts[:, 0].sum()} rounds, {parts[-1][:, 0].sum()} in the last step"
            )


if __name__ == "__main__":
    main()
