"""When to stop drafting because plain decoding is faster, and when to look again."""

from __future__ import annotations

_FORGET = 0.98  # per drafted cycle, of the running speed
_PATIENCE = 2.0  # plain cycles that may be lost in a row of losing cycles before drafting stops
_NOISY_PATIENCE = 6.0  # by what was really accepted: quicker to see a change, and noisier
_PROBING = 0.008  # share of the time that looking again may cost
_TRIAL_CYCLES = 8
_PAYS = 1.03  # a trial must win by this much, or the policy would flap
_HOPELESS = 1.0  # plain cycles lost that end a trial early
_REMEMBER = 0.998  # per drafted cycle, of what drafting earned
_ENOUGH = 10.0  # plain cycles earned; a trial on a new text risks a tenth of them


class Floor:
    """Decides whether to draft at all, from the tokens and time of drafted cycles.

    Time is in plain cycles, tokens are per sequence, so plain decoding has speed 1. Losses against
    it add up and gains pay them back, down to zero (Page's cumulative sum test, 1954); at
    ``_PATIENCE`` drafting stops. From then on every plain cycle saves up ``_PROBING`` of itself,
    and when the last trial is paid for the next is held: a few drafted cycles, ended early when
    they go badly. Another text is a new case: where drafting has earned enough so far, it is tried
    there at once.
    """

    def __init__(self) -> None:
        self._tokens = self._cost = 0.0
        self._lost = self._noisily_lost = 0.0
        self._savings = 0.0
        self._earned = 0.0
        self._is_plain = False
        self._trial: tuple[int, float, float] | None = None  # cycles, tokens, cost

    @property
    def speed(self) -> float | None:
        """Running speed of drafted cycles; None before any."""
        return self._tokens / self._cost if self._cost else None

    @property
    def in_trial(self) -> bool:
        return self._trial is not None

    @property
    def begins_trial(self) -> bool:
        """Whether this cycle is the first of a trial."""
        return self._trial is not None and self._trial[0] == 0

    def drafts(self, *, new_text: bool = False) -> bool:
        """Whether this cycle drafts. Call once per cycle.

        Args:
            new_text: this cycle is the first of a text.
        """
        if new_text and self._is_plain and self._earned > _ENOUGH:
            self._savings = 0.0
        if self._is_plain:
            self._savings += _PROBING
            if self._savings < 0:
                return False
            self._is_plain = False
            self._trial = (0, 0.0, 0.0)
            self._tokens = self._cost = 0.0
        return True

    def observe(self, expected: float, tokens: float, cost: float) -> None:
        """One drafted cycle.

        Args:
            expected: tokens per sequence it stood for, with little noise.
            tokens: tokens per sequence it gave; decides trials and what they cost.
            cost: its time in plain cycles.
        """
        self._earned = _REMEMBER * self._earned + tokens - cost
        self._tokens = _FORGET * self._tokens + expected
        self._cost = _FORGET * self._cost + cost
        if self._trial is not None:
            self._judge(self._trial[0] + 1, self._trial[1] + tokens, self._trial[2] + cost)
            return
        self._lost = max(self._lost + cost - expected, 0.0)
        self._noisily_lost = max(self._noisily_lost + cost - tokens, 0.0)
        if self._lost > _PATIENCE or self._noisily_lost > _NOISY_PATIENCE:
            self._stop(cost - expected)

    def _judge(self, cycles: int, tokens: float, cost: float) -> None:
        self._trial = (cycles, tokens, cost)
        is_over = cycles >= _TRIAL_CYCLES
        if cost - tokens > _HOPELESS or (is_over and tokens < _PAYS * cost):
            self._stop(cost - tokens)
        elif is_over:
            self._trial = None

    def _stop(self, price: float) -> None:
        """Decode plainly until ``price`` is saved, at least a tenth of a cycle."""
        self._is_plain, self._trial = True, None
        self._lost = self._noisily_lost = 0.0
        self._savings = -max(price, 0.1)
