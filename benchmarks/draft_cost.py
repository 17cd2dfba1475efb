"""What one draft costs, as a share of a plain cycle (one row through the target, head and draw).

Plain decoding and every budget take turns prompt by prompt; medians over cycles. A draft is all
that the drafter does before the target's pass: new context, its own pass, ranking, enumeration, and
the choice of the budget. Run it on an otherwise idle machine.

    python benchmarks/draft_cost.py --drafter shipped --prompts 8 --tokens 48 --save
"""

from __future__ import annotations

import argparse
from statistics import median

from common import encode_prompts, machine, save

import draftwood as dw
from draftwood.records import StageSeconds
from draftwood.target.load import load_target

PLAIN = "off"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="demo")
    parser.add_argument("--drafter", default="shipped")
    parser.add_argument("--budgets", nargs="+", default=["chain", "8", "32"])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    target = load_target(args.target)
    engines = {PLAIN: dw.load(target, "none", PLAIN, calibrate=False)}
    for budget in args.budgets:
        engines[budget] = dw.load(target, args.drafter, budget, calibrate=False)
    seconds: dict[str, list[StageSeconds]] = {name: [] for name in engines}
    params = dw.SamplingParams(max_new_tokens=args.tokens)
    for index, prompt in enumerate(encode_prompts(target, args.prompts + 1)):
        for name, engine in engines.items():
            (output,) = engine.generate([prompt], params)
            if index > 0:  # the first one warms everything up
                seconds[name] += [cycle.seconds for cycle in output.cycles]
    plain_s = median(each.verify_s + each.walk_s + each.commit_s for each in seconds[PLAIN])
    print(f"a plain cycle: {plain_s * 1e3:.1f} ms")
    drafts = {}
    for name in args.budgets:
        draft_s = median(each.draft_s for each in seconds[name])
        drafts[name] = {"draft_s": draft_s, "share": draft_s / plain_s}
        print(f"{name:>8}: a draft {draft_s * 1e3:.2f} ms, {draft_s / plain_s:.2f} of it")
    if args.save:
        save("draft_cost", machine=machine(), settings=vars(args), plain_s=plain_s, drafts=drafts)


if __name__ == "__main__":
    main()
