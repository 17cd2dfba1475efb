"""GGUF files: dequantised once into an ordinary transformers folder."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftwood.errors import DraftwoodError
from draftwood.target.progress import silent, spinning
from draftwood.target.store import build_once

_REQUIRED = ("gguf", "accelerate")
_CHUNK_BYTES = 1 << 22


def is_gguf(path: Path) -> bool:
    """Whether this is a file that begins like GGUF."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def dequantised(path: Path, dtype: torch.dtype) -> Path:
    """Folder with the model and tokenizer of a GGUF file, converted on first use.

    Cached by the file's content and ``dtype``.

    Raises:
        DraftwoodError: the ``gguf`` extra is not installed.
        ValueError: transformers cannot read this file.
    """
    require_gguf()
    key = f"{path.stem}-{sha256(path)[:16]}-{str(dtype).removeprefix('torch.')}"

    def build(scratch: Path) -> None:
        with spinning(f"Converting {path.name}"):
            convert(path, scratch / "model", dtype)

    return build_once(key, build)


def require_gguf() -> None:
    """Raise DraftwoodError unless the packages that read GGUF files are installed."""
    missing = [name for name in _REQUIRED if importlib.util.find_spec(name) is None]
    if missing:
        raise DraftwoodError(
            f"reading a GGUF file needs {' and '.join(missing)}: pip install 'draftwood[gguf]'"
        )


def sha256(path: Path) -> str:
    """Hex digest of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def convert(path: Path, folder: Path, dtype: torch.dtype) -> None:
    """Dequantise a GGUF file and save weights, configuration and tokenizer in ``folder``."""
    place: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    with silent():
        try:
            model = AutoModelForCausalLM.from_pretrained(
                path.parent, dtype=dtype, **place, **_dequantize_option()
            )
            tokenizer = AutoTokenizer.from_pretrained(path.parent, **place)
        except (OSError, ValueError, KeyError, NotImplementedError) as error:
            raise ValueError(f"cannot read the GGUF file {path}: {error}") from error
        # What is saved is a dense model: nothing may claim that it is still quantised.
        for name in ("quantization_config", "_pre_quantization_dtype"):
            if hasattr(model.config, name):
                delattr(model.config, name)
        _mend_tokenizer(tokenizer, model)
        _add_end_of_turn(model, path)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _mend_tokenizer(tokenizer: Any, model: Any) -> None:
    """Undo what older transformers make of a GGUF tokenizer: a wrong end, edited spaces."""
    if isinstance(model.config.eos_token_id, int):
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    tokenizer.clean_up_tokenization_spaces = False


def _add_end_of_turn(model: Any, path: Path) -> None:
    """Also stop at the file's end-of-turn token, where it names one beside end-of-sequence."""
    from gguf import GGUFReader

    field = GGUFReader(path).fields.get("tokenizer.ggml.eot_token_id")
    if field is None:
        return
    known = model.generation_config.eos_token_id
    ids = [] if known is None else known if isinstance(known, list) else [known]
    end_of_turn = int(field.contents())
    if end_of_turn not in ids:
        model.generation_config.eos_token_id = [*ids, end_of_turn]


def _dequantize_option() -> dict[str, Any]:
    # Older transformers always dequantise; newer ones keep the blocks unless told otherwise.
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}
