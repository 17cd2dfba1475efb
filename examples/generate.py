"""Generate text, and see how many passes through the model it took."""

import draftwood as dw

engine = dw.load("demo")
output = engine.generate("Why is the sky blue?", dw.SamplingParams(max_new_tokens=96))[0]

print(output.text)
print()
print(f"{len(output.token_ids)} tokens in {output.num_cycles} cycles, τ = ", end="")
print(f"{output.acceptance_length:.2f}, ended by: {output.finish_reason}")
