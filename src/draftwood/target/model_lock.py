"""One lock per model, whoever wraps it."""

from __future__ import annotations

import threading
from weakref import WeakKeyDictionary

from torch import nn

# Switching a model's attention and forwards is seen by every thread that uses the model, so all
# targets made of one model must share the lock.
_locks: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_making = threading.Lock()


def lock_of(model: nn.Module) -> threading.RLock:
    """The lock to hold while a model runs with anything of ours in it."""
    with _making:
        return _locks.setdefault(model, threading.RLock())
