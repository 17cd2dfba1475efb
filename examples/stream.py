"""Print text as it becomes certain."""

import draftwood as dw

engine = dw.load("demo")
params = dw.SamplingParams(temperature=0.7, top_p=0.95, seed=1, max_new_tokens=96)

for piece in engine.stream("Write a short story about an old lighthouse.", params):
    print(piece, end="", flush=True)
print()
