"""Several prompts with their own settings in the same passes; one of them is cancelled.

``generate`` does this for you. Here are the parts it is made of.
"""

import draftwood as dw

engine = dw.load("demo", budget=8)
requests = {
    "Name three rivers.": dw.SamplingParams(max_new_tokens=48),
    "Invent a name for a boat.": dw.SamplingParams(temperature=1.0, seed=3, max_new_tokens=48),
    "Count to one thousand.": dw.SamplingParams(max_new_tokens=500, ignore_eos=True),
}
ids = {engine.add(prompt, params): prompt for prompt, params in requests.items()}
endless = list(ids)[-1]

num_steps = 0
while engine.num_active:
    for event in engine.step():
        if event.output is not None:
            print(f"{ids[event.seq_id]}\n  → {event.output.text!r}\n")
    num_steps += 1
    if num_steps == 30 and (output := engine.abort(endless)) is not None:
        print(f"{ids[endless]}\n  → cancelled after {len(output.token_ids)} tokens\n")
