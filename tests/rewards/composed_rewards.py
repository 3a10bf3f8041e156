"""Reward functions that the composition tests name. Imported by reward workers."""

import os
import time

from rl_tpu.rewards import takes_group, takes_response


def number(text, answer, prompt):
    return float(text)


def two_parts(text, answer, prompt):
    return {"one": 1.0, "two": 2.0}


@takes_response
def tokens(response, answer, prompt):
    return float(response.tokens + (response.finish_reason == "length"))


@takes_group
def rank(responses, answer, prompt, *, factor=1.0):
    """Position of a text in the sorted group; a text that is no number cannot be ranked."""
    order = sorted(response.text for response in responses)
    return [
        factor * order.index(response.text)
        if response.text[:1].isdigit()
        else ValueError(f"no rank for {response.text!r}")
        for response in responses
    ]


@takes_group
def broken(responses, answer, prompt):
    """The group's first text says how."""
    how = responses[0].text
    if how == "hang":
        time.sleep(600)
    elif how == "crash":
        os._exit(3)
    elif how == "raise":
        raise KeyError("all")
    elif how == "short":
        return [1.0]
    elif how == "number":
        return 1.0
    elif how == "nan":
        return [float("nan")] + [1.0] * (len(responses) - 1)
    return [1.0] * len(responses)


def greedy(text, answer, prompt):
    """Takes as many megabytes as the text says."""
    return float(len(bytearray(int(text) * 10**6)) > 0)
