"""Samples of several turns: a function that the user wrote talks to the engine, a tool and an environment.

The option `rollout.function` names the function. It gets a `Conversation`, asks the policy for a reply, appends what a
tool or the environment answers, and goes on. All turns of a conversation make one `Sample`: replies are trained, all
other tokens have loss mask 0. `examples/calculator/` is a worked example. slime's counterpart is its custom generate
function (slime/rollout/sglang_rollout.py, `--custom-generate-function-path`).

Conversations run in threads, so while one waits for its tool the engine decodes the others. A prompt's conversations
stay on one engine, whose prefix cache holds their turns, as long as no engine is lost. Under the position-keyed
verifier all turns of a sample have one seed, and noise is keyed by the position in the sample, so the text depends on
no timing.
"""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_rlspec.custom import FunctionError, Unwound, named
from megatron_rlspec.engine import EngineError, RequestError
from megatron_rlspec.rollout.pool import EnginePool
from megatron_rlspec.speculation.acceptance import pooled
from megatron_rlspec.tasks.reward_worker import number
from megatron_rlspec.texts import shown, tokenize_continuations
from megatron_rlspec.types import Request, Sample, Sampling, Status

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_THREADS = 1024  # conversations that run at once; the others wait for a thread
LONGEST_TOKEN = 1024  # characters; assumed to be more than any token has
# between two checks of how long functions have run, and between two aborts after a failure
LOOK_SECONDS = 1.0


class Conversation:
    """One sample while it is generated: what the user's function gets. Its public fields are the user's interface.

    `reply` and `append` raise RuntimeError while a reply in another thread is not finished. `sample` is for
    `Conversations`, not for the user.

    prompt     the task, with `label` and `metadata`
    sampling   the run's sampling; `max_new_tokens` bounds all tokens after the prompt, replies or not
    tokenizer  of the model
    text       everything after the prompt
    finished   whether the last reply ended with the model's end-of-sequence token, a stop token or a stop string
    remaining  tokens that may still follow
    """

    def __init__(
        self,
        request: Request,
        sampling: Sampling,
        tokenizer: PreTrainedTokenizerBase,
        draw: Callable[[Request, Sampling], Sample],
        keyed: bool,
    ) -> None:
        self.prompt = request.prompt
        self.sampling = sampling
        self.tokenizer = tokenizer
        self.finished = False
        self._request = request
        self._draw = draw
        self._keyed = keyed
        self._status: Status = "truncated"  # of the last reply; this is the sample's status, too
        self._turns = 0  # replies that engines have finished
        # Three lists of one length, with an entry for each token after the prompt.
        self._tokens: list[int] = []
        self._trained: list[bool] = []
        self._logprobs: list[float] = []
        self._versions: list[tuple[int, int]] = []  # (version, index of its first token)
        self._accepted: list[int] = []  # as `Sample.accepted`
        self._drafted: list[tuple[int, int]] = []  # as `Sample.accepted_spans`
        # For `Conversations`: since when the function runs, by time.monotonic(). None while an engine replies, because
        # the engine's time does not count as the function's, and after the function has ended.
        self._since: float | None = time.monotonic()

    @property
    def remaining(self) -> int:
        return self.sampling.max_new_tokens - len(self._tokens)

    @property
    def text(self) -> str:
        return str(self.tokenizer.decode(self._tokens, skip_special_tokens=True))

    def reply(
        self,
        max_new_tokens: int | None = None,
        stop_token_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
    ) -> str:
        """Let the policy continue, and return the text of this reply; "" if no token may follow.

        The reply ends with the model's end-of-sequence token, one of `stop_token_ids`, the token that completes one of
        the strings `stop` or of `rollout.stop`, after `max_new_tokens`, or where nothing remains.
        """
        self._check_alone()
        # `operator.index` refuses floats with a TypeError here, in the user's line, and takes integers of numpy
        most = self.remaining  # tokens of this reply
        if max_new_tokens is not None:
            most = min(operator.index(max_new_tokens), most)
        stop_strings = (stop,) if isinstance(stop, str) else tuple(stop)
        sampling = replace(
            self.sampling,
            max_new_tokens=most,
            stop_token_ids=tuple(operator.index(token) for token in stop_token_ids),
            stop=self.sampling.stop + stop_strings,
        )
        if most < 1:
            self.finished = False
            self._status = "truncated"
            return ""
        so_far = np.array([*self.prompt.tokens, *self._tokens], np.int64)
        # The number of the turn has a fixed width, because no id may be a prefix of another (`types.Request`). Four
        # digits are enough for 10,000 turns.
        name = f"{self._request.id}-t{self._turns:04d}"
        prompt = replace(self.prompt, tokens=so_far)
        turn = Request(name, prompt, self._seed())
        self._since = None
        try:
            drawn = self._draw(turn, sampling)
        finally:
            self._since = time.monotonic()
        self._turns += 1
        self._add(drawn)
        self._status = drawn.status
        self.finished = drawn.status == "finished"
        if drawn.status == "aborted":
            raise Unwound  # ends the user's function; `Conversations._converse` catches it
        return str(self.tokenizer.decode(drawn.response, skip_special_tokens=True))

    def _seed(self) -> int:
        """Return the next turn's seed: the sample's own if noise is keyed by positions.

        Other noise is keyed by the number of the draw, which begins at 0 in every turn. With one seed, all turns would
        have the same noise.
        """
        seed = self._request.seed
        if self._keyed or not self._turns:
            return seed
        sequence = np.random.SeedSequence((seed, self._turns))
        # seeds of requests are below 2³¹, as those of `noise.seed_of`
        return int(sequence.generate_state(1)[0]) & 0x7FFF_FFFF

    def append(self, text: str) -> None:
        """Append text that the policy did not write. Its tokens have loss mask 0. Text past the limit is cut.

        Special tokens in it, such as those of a chat template, are recognised.
        """
        self._check_alone()
        if not isinstance(text, str):  # a tokenizer takes a list for several texts
            raise TypeError(f"append: expected text, found {type(text).__name__}")
        text = text[: self.remaining * LONGEST_TOKEN]  # a tokenizer takes minutes for megabytes
        ids = tokenize_continuations(self.tokenizer, [text])[0][: self.remaining]
        self._tokens += ids
        self._trained += [False] * len(ids)
        self._logprobs += [0.0] * len(ids)

    def _check_alone(self) -> None:
        """Raise RuntimeError while an engine replies.

        Tokens added now would stand before that reply, which is made without them.
        """
        if self._since is None:
            raise RuntimeError(
                "a reply to this conversation goes on in another thread; expected one turn at a time"
            )

    def _add(self, drawn: Sample) -> None:
        """Append a turn's tokens. Indices of its response become indices of all tokens after the sample's prompt.

        drawn  a sample whose prompt is the sample's prompt and all tokens so far
        """
        start = len(self._tokens)
        self._tokens += drawn.response.tolist()
        self._trained += [True] * len(drawn.response)
        self._logprobs += drawn.behaviour_logprobs[drawn.prompt_len :].tolist()
        for version, first, _ in drawn.policy_versions:
            if not self._versions or self._versions[-1][0] != version:
                self._versions.append((version, start + first))
        for first, last in drawn.accepted_spans:
            self._drafted.append((start + first, start + last))
        self._accepted = pooled([self._accepted, drawn.accepted]).tolist()

    def sample(self) -> Sample:
        """Return the sample of all turns so far, with `loss_mask` 1 on the replies only.

        `policy_versions` must cover all tokens (`packing/pack.py` checks it). So tokens that the policy did not write
        get the version of the reply before them, or of the first reply.
        """
        spans: list[tuple[int, int, int]] = []
        ends = [first for _, first in self._versions[1:]] + [len(self._tokens)]
        # not strict: before the first reply there is no version
        for (version, first), end in zip(self._versions, ends, strict=False):
            spans.append((version, first if spans else 0, end))  # the first span begins at token 0
        sample = self._request.sample(
            self._status,
            self._tokens,
            self._logprobs,
            policy_versions=tuple(spans),
            accepted=tuple(self._accepted),
            accepted_spans=tuple(self._drafted),
        )
        sample.loss_mask[sample.prompt_len :] = self._trained
        return sample


class Conversations:
    """Generates samples of several turns, each in a thread. `run/generation.py` calls `draw`.

    running  ids of the turns that engines generate now, as the keys of a dict; other threads read copies of it
    seconds  that a function may run between two replies, and before the first and after the last reply
    keyed    whether the verifier is position-keyed; otherwise every turn of a sample has a seed of its own
    """

    def __init__(
        self,
        function: Callable[[Conversation], Any],
        pool: EnginePool,
        tokenizer: PreTrainedTokenizerBase,
        seconds: float = 600.0,
        keyed: bool = True,
    ) -> None:
        self.running: dict[str, None] = {}
        self._function = function
        self._message_start = named("rollout.function", function)
        self._pool = pool
        self._tokenizer = tokenizer
        self._seconds = seconds
        self._keyed = keyed
        self._open: dict[int, Conversation] = {}  # by the index of the request in `draw`
        self._failure: BaseException | None = None  # the first one; it ends all conversations
        # Set by a failure, by time.monotonic(): from this time on `draw` waits for no conversation that is left.
        self._give_up_at = 0.0
        # guards `_failure`, and what a lost engine changes in the pool
        self._lock = threading.Lock()

    def draw(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        on_sample: Callable[[Sample], None] = lambda sample: None,
    ) -> list[Sample]:
        """Return one sample per request, in their order.

        If the function returned a number, that is the sample's reward, and `metadata["own_reward"]` is set:
        `run/generation.py` then computes none. `on_sample` is called with each sample when its function has returned,
        in the conversation's thread.

        One call at a time: the calls share this object's state. No two requests may have the same id.

        Raises EngineError if no engine is left, and FunctionError if the function raised, ran too long, returned
        something else than None or a finite number, or asked for no reply. The other conversations are ended first.
        """
        self._failure = None
        samples: dict[int, Sample] = {}
        waiting = iter(range(len(requests)))  # indices of the requests that no thread has taken
        ended = threading.Condition()  # guards `samples` and `waiting`

        def work() -> None:
            while (index := next_index()) is not None:
                sample = self._converse(index, requests[index], sampling, on_sample)
                with ended:
                    samples[index] = sample
                    ended.notify()

        def next_index() -> int | None:
            with ended:
                return next(waiting, None)

        # A function that never returns keeps its thread. A daemon thread does not keep the process from ending.
        for _ in range(min(len(requests), MOST_THREADS)):
            threading.Thread(target=work, name="conversation", daemon=True).start()
        while len(samples) < len(requests):
            with ended:
                ended.wait_for(lambda: len(samples) == len(requests), LOOK_SECONDS)
            stuck = self._overdue()
            if stuck and self._failure is None:
                reason = f"did not go on for {self._seconds:g} s (rollout.timeout_seconds)"
                self._fail(FunctionError(f"{self._message_start}: the function {reason}"))
            if self._failure is not None:
                # Only functions that hang are left. Nothing can end their threads.
                settled = len(samples) + len(stuck) >= len(requests)
                if settled or time.monotonic() > self._give_up_at:
                    break
                self._abort()  # again: some turns may not have reached their engine at the first abort
        if self._failure is not None:
            raise self._failure
        return [samples[index] for index in range(len(requests))]

    def _overdue(self) -> list[int]:
        """Return the indices, in `requests`, of the conversations whose function has run too long."""
        limit = time.monotonic() - self._seconds
        stuck = []
        for index, conversation in list(self._open.items()):
            since = conversation._since
            if since is not None and since < limit:
                stuck.append(index)
        return stuck

    def _converse(
        self,
        index: int,
        request: Request,
        sampling: Sampling,
        on_sample: Callable[[Sample], None],
    ) -> Sample:
        """Hold one conversation and return its sample; after a failure, the sample as far as it goes."""
        conversation = Conversation(
            request,
            sampling,
            self._tokenizer,
            self._reply,
            self._keyed,
        )
        self._open[index] = conversation
        try:
            if self._failure is not None:
                raise Unwound
            reward = self._function(conversation)
            if conversation._since is None:
                raise FunctionError(
                    f"{self._message_start}: the function returned while a thread of it waits for a reply"
                )
            sample = conversation.sample()
            if reward is not None:
                sample.reward = self._reward_of(reward)
                sample.metadata["own_reward"] = True
            if not sample.loss_mask.any():
                raise FunctionError(
                    f"{self._message_start}: the function asked for no reply; expected at least one"
                )
            conversation._since = None  # the time of `on_sample` is not the function's
            on_sample(sample)
        except Unwound:
            return conversation.sample()
        except BaseException as error:
            # An error of `on_sample` or an engine, or the FunctionError that `custom.load` makes of the function's own.
            # `draw` raises it in its caller's thread. An error raised in this thread would be lost.
            self._fail(error)
            return conversation.sample()
        finally:
            self._open.pop(index, None)
        return sample

    def _reward_of(self, reward: object) -> float:
        """Return a function's reward. Raises FunctionError."""
        try:
            return number(reward)
        except ValueError:
            returned = f"the function returned {shown(reward)}"
            raise FunctionError(
                f"{self._message_start}: {returned}; expected None or a finite number"
            ) from None

    def _fail(self, error: BaseException) -> None:
        """Store the first failure, which ends all conversations, and abort the turns that engines generate."""
        with self._lock:
            if self._failure is None:
                self._give_up_at = time.monotonic() + self._seconds
                self._failure = error
        self._abort()

    def _abort(self) -> None:
        """Abort all turns on all engines: their conversations end by `Unwound`."""
        for engine in list(self._pool.engines.values()):
            try:
                engine.abort(list(self.running))
            except EngineError:  # a lost engine is dropped by the next call that needs it
                continue

    def _reply(self, request: Request, sampling: Sampling) -> Sample:
        """Generate one turn. If its engine is lost, another one continues it. Raises Unwound after any failure.

        `_fail` gets the failure itself. A `Conversation` calls this as its `draw`, in its thread.
        """
        self.running[request.id] = None
        try:
            while self._failure is None:
                self._pool.check()
                engines = dict(self._pool.engines)
                names = list(engines)
                if not names:  # the last one has just been dropped
                    continue
                # by the prompt, so that its conversations share one engine's prefix cache
                name = names[request.prompt.id % len(names)]
                try:
                    return engines[name].generate([request], sampling)[0]
                except RequestError:
                    raise
                except EngineError as error:
                    begun_so_far = error.begun.get(request.id, request.partial)
                    request = replace(request, partial=begun_so_far)
                    # Conversations of one engine fail at the same time. `drop` takes the engine out once.
                    with self._lock:
                        for begun in error.begun.values():
                            self._pool.continued_tokens += len(begun.response)
                        self._pool.drop(name, error)
        except EngineError as error:  # no engine is left, or an engine refuses the request
            self._fail(error)
        finally:
            del self.running[request.id]
        raise Unwound
