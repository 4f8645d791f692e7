"""A corpus and a model small enough to train many times, and a stand-in for attention where attention is not the point."""

import pytest
import torch

from flamia.train import Shape, TrainConfig, load_corpus

SENTENCE = "the query reads the key and the value answers while a future token waits behind the mask"


@pytest.fixture(autouse=True)
def one_thread():
    """Bitwise claims hold for a fixed number of threads, and small tensors gain nothing from more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def corpus(tmp_path):
    words = SENTENCE.split()
    generator = torch.Generator().manual_seed(0)
    folder = tmp_path / "text"
    folder.mkdir()
    for index in range(40):
        chosen = torch.randint(len(words), (60,), generator=generator).tolist()
        (folder / f"{index:02}.txt").write_text(" ".join(words[i] for i in chosen))
    return load_corpus(folder, validation=0.2)


@pytest.fixture
def config():
    return TrainConfig(
        recipe="mxfp8/strict",
        shape=Shape(layers=1, width=32, heads=2, kv_heads=1, head_dim=16, hidden=64),
        context=200,
        tokens=256,
        steps=6,
        warmup=2,
        evaluate_every=3,
        evaluate_batches=2,
    )


@pytest.fixture
def no_attention():
    """Zeros: a model that cannot look back."""
    return lambda q, k, v, cu_seqlens: torch.zeros_like(q)
