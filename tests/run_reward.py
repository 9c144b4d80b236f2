"""A reward that a random policy gets often; test_run.py names it as `run_reward:by_length`."""


def by_length(prompt: str, response: str, label: str, metadata: dict) -> float:
    return len(response) % 3 / 2


def share_of_ones(prompt: str, response: str, label: str, metadata: dict) -> float:
    return response.count("1") / max(1, len(response))


def fails(prompt: str, response: str, label: str, metadata: dict) -> float:
    raise RuntimeError("broken")


CALLS: list[str] = []


def fails_later(prompt: str, response: str, label: str, metadata: dict) -> float:
    """Succeeds for the two samples of a first evaluation only."""
    CALLS.append(response)
    if len(CALLS) > 2:
        raise RuntimeError("broken")
    return 1.0


def fails_on_some(prompt: str, response: str, label: str, metadata: dict) -> float:
    if len(response) % 2:
        raise ValueError(f"length {len(response)}")
    return len(response) % 3 / 2
