"""A rollout with a tool: whenever the policy writes "=", a calculator writes the result behind it.

`solve` is the function of `rollout.function`. The policy's own tokens are trained; the calculator's are read only.
"""

from __future__ import annotations

import ast
import operator
import re

from megatron_rlspec.rollout.conversation import Conversation

MOST_TURNS = 8
EXPRESSION = re.compile(r"[-+*/(). \d]+$")
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def solve(conversation: Conversation) -> None:
    """Let the policy write up to its end, with the results of at most `MOST_TURNS` calculations."""
    equals = tokens_of_equals(conversation)
    for _ in range(MOST_TURNS):
        reply = conversation.reply(stop_token_ids=equals)
        if not reply.rstrip().endswith("="):
            return  # the policy ended its answer, or no token is left
        result = calculate(reply.rstrip().removesuffix("="))
        if result:
            conversation.append(f" {result}")
    conversation.reply()


def tokens_of_equals(conversation: Conversation) -> list[int]:
    """Return the ids of the tokens that end with "=": "=", " =" and what else the vocabulary has."""
    vocabulary = conversation.tokenizer.get_vocab()
    return [index for token, index in vocabulary.items() if token.endswith("=")]


def calculate(text: str) -> str:
    """Return the value of the arithmetic expression at the end of `text`; "" if there is none, or it has no value."""
    found = EXPRESSION.search(text)
    if found is None:
        return ""
    try:
        value = _value(ast.parse(found.group().strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError):
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _value(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("no arithmetic")
