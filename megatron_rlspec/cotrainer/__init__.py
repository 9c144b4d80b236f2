"""One drafter that learns beside any Megatron trainer, is pushed with its policy, and decodes where that pays.

    fields.py       whole sequences ──► what the drafter reads and predicts on this rank
    drafter.py      the policy's hidden states, detached ──► the drafter's gradients, its update, predicted acceptance
    speculation.py  rounds of all engines ──► the rule by which each engine chooses its drafts
    cotrainer.py    `CoTrainer`, the public class, for a trainer of your own

The integration with slime calls the same parts; our loop calls `speculation.py`. What a push checks is in `push/`.
"""
