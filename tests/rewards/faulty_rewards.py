"""Reward functions that misbehave as a model's text tells them to. Imported by reward workers."""

import os
import re
import signal
import subprocess
import sys
import time


def by_text(text, answer, prompt, *, scale=1.0):
    """Do what the response says; anything else is a number."""
    if text == "hang":
        time.sleep(3600)
    elif text == "hang in C":
        re.match(r"(a+)+$", "a" * 60 + "b")  # catastrophic backtracking: never looks at signals
    elif text == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif text == "exit":
        os._exit(3)
    elif text == "quiet exit":
        os._exit(0)
    elif text == "sys.exit":
        sys.exit(5)
    elif text == "fork":
        os.fork()
        return 0.5
    elif text.startswith("hang in a child "):
        with subprocess.Popen(["sleep", "3600"]) as child, open(text.rpartition(" ")[2], "w") as file:
            print(child.pid, file=file, flush=True)
            child.wait()
    elif text == "raise":
        raise KeyError("no such\nkey")
    elif text == "raise unpicklable":
        raise type("LocalError", (Exception,), {})("made on the spot")
    elif text == "parts":
        return {"right": 1.0, "brief": 0.25}
    elif text == "bad part":
        return {"right": 1.0, "brief": float("nan")}
    elif text == "none":
        return None
    elif text == "text":
        return "1.0"
    elif text == "empty":
        return {}
    elif text == "pid":
        return float(os.getpid())
    elif text == "context":
        return float(answer == [1] and prompt.id == "p" and prompt.metadata == {"k": "v"} and prompt.ids == (1, 2))
    return float(text) * scale


def fails_to_import_only_in_workers(text, answer, prompt):
    return 0.0


if os.environ.get("FAULTY_REWARDS_BREAK") == "1" and "pytest" not in sys.modules:
    raise ImportError("broken in workers alone")
