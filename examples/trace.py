"""Record every draft tree of a generation and draw the first few as text."""

import json
import tempfile
from pathlib import Path

import draftwood as dw
from draftwood.trace import TraceWriter

PROMPT = "Write a Python class Point with methods to add, subtract and scale."

engine = dw.load("demo", drafter="lookup", budget=8)
path = Path(tempfile.mkdtemp()) / "trace.jsonl"
with TraceWriter(path, engine.target, prompt=PROMPT) as trace:
    engine.on_cycle = trace
    engine.generate(PROMPT, dw.SamplingParams(max_new_tokens=96))

lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
cycles = [line for line in lines if line["kind"] == "cycle" and len(line["tokens"]) > 1]
for cycle in cycles[:4]:
    print(
        f"\nposition {cycle['start']}, budget {cycle['budget']}, {cycle['num_committed']} committed"
    )
    accepted = set(cycle["path"])
    depths: list[int] = []
    for node, (text, parent) in enumerate(zip(cycle["texts"], cycle["parents"], strict=True)):
        depths.append(0 if parent < 0 else depths[parent] + 1)
        print("  " + "  " * depths[node] + repr(text) + ("  ✓" if node in accepted else ""))
print(f"\n{len(lines) - 1} lines in {path}")
