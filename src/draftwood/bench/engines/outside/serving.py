"""The loop of the worker scripts beside it (see ``worker.py``); imports nothing but Python's own.

These scripts have a folder to themselves, because a script's folder comes first where it imports
from: a neighbour called like an engine's dependency would be taken for it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any


def serve(
    load: Callable[[dict[str, Any]], tuple[Any, dict[str, str]]],
    run: Callable[[Any, list[dict[str, Any]]], dict[str, Any]],
) -> None:
    """Answer JSON lines until standard input ends.

    Args:
        load: message → (engine, versions).
        run: engine, requests → the fields of the answer.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the engine prints is no answer
    engine = None
    for line in sys.stdin:
        message = json.loads(line)
        try:
            if message["op"] == "load":
                engine, versions = load(message)
                answer = {"ok": True, "versions": versions}
            else:
                answer = {"ok": True, **run(engine, message["requests"])}
        except Exception as error:
            answer = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
