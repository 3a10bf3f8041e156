"""Rewards for whole-job tests, found by import path."""


def broken(text, answer, prompt):
    raise ValueError("no idea what this is")
