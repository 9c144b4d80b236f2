"""A reward that a random policy gets often: test_run.py names it as `run_reward:by_length`."""


def by_length(prompt: str, response: str, label: str, metadata: dict) -> float:
    return len(response) % 3 / 2
