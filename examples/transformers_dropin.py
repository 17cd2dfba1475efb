"""Accelerate ``model.generate`` in code that already uses transformers."""

import torch

import draftwood as dw

target = dw.load("demo").target
model, tokenizer = target.model, target.tokenizer  # any AutoModelForCausalLM and its tokenizer

chat = [
    {"role": "user", "content": "Repeat after me: one two three, one two three, one two three."}
]
inputs = tokenizer.apply_chat_template(
    chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
)
settings = {"max_new_tokens": 48, "do_sample": False}

plain = model.generate(**inputs, **settings)
decode = dw.custom_generate("lookup", budget=8)  # keep it: it learns from call to call
fast = model.generate(**inputs, **settings, custom_generate=decode)

print(tokenizer.decode(fast[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
print("identical:", torch.equal(plain, fast))
