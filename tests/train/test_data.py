"""Packing: every byte once, no padding, no target across an end, an order that only the seed decides."""

import pytest
import torch

from flamia.train.data import IGNORED, PackedStream, find_files, load_corpus, pack, standard_library


def files(*texts: bytes) -> tuple[torch.Tensor, ...]:
    return tuple(torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in texts)


def words(seed: int, lengths: list[int]) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(256, (n,), generator=generator, dtype=torch.uint8) for n in lengths)


def test_pack_restarts_positions_and_masks_the_last_byte_of_each_document():
    batch = pack(list(files(b"abc", b"d", b"ef")))
    assert batch.tokens.tolist() == list(b"abcdef")
    assert batch.targets.tolist() == [ord("b"), ord("c"), IGNORED, IGNORED, ord("f"), IGNORED]
    assert batch.positions.tolist() == [0, 1, 2, 0, 0, 1]
    assert batch.cu_seqlens.tolist() == [0, 3, 4, 6] and batch.cu_seqlens.dtype == torch.int32
    assert batch.lengths == (3, 1, 2)


def test_batches_are_full_and_an_epoch_is_every_byte_once():
    lengths = [1, 5, 40, 17, 64, 3, 62]  # 192 bytes: an epoch is 24 batches of 8 exactly
    texts = words(0, lengths)
    stream = PackedStream(texts, tokens=8, context=16, seed=3)
    seen = []
    for _ in range(24):
        batch = stream.next()
        assert len(batch.tokens) == 8 == batch.cu_seqlens[-1] == sum(batch.lengths)
        assert max(batch.lengths) <= 16 and min(batch.lengths) > 0
        seen += batch.tokens.tolist()
    assert sorted(seen) == sorted(torch.cat(texts).tolist())
    assert stream.epoch == 0
    stream.next()
    assert stream.epoch == 1


def test_a_document_that_does_not_fit_is_cut_and_goes_on_as_its_own_document():
    stream = PackedStream(files(b"abcdefghij"), tokens=6, context=10, seed=0)
    first, second = stream.next(), stream.next()
    assert bytes(first.tokens.tolist()) == b"abcdef" and first.targets[-1] == IGNORED
    assert second.lengths[0] == 4 and bytes(second.tokens.tolist()[:4]) == b"ghij"
    assert second.positions.tolist()[:4] == [0, 1, 2, 3]


def test_the_seed_alone_decides_the_order():
    texts = words(1, [50] * 30)
    same = [PackedStream(texts, tokens=64, context=50, seed=5) for _ in range(2)]
    other = PackedStream(texts, tokens=64, context=50, seed=6)
    a, b, c = (torch.cat([stream.next().tokens for _ in range(40)]) for stream in (*same, other))
    assert torch.equal(a, b) and not torch.equal(a, c)


def test_a_stream_resumes_at_the_byte_where_it_stopped():
    texts = words(2, [7, 90, 33, 1, 58])
    stream = PackedStream(texts, tokens=40, context=20, seed=1)
    for _ in range(11):  # into the third epoch, in the middle of a piece
        stream.next()
    state = stream.state()
    assert state["epoch"] == 2 and state["offset"] > 0
    expected = [stream.next() for _ in range(9)]
    resumed = PackedStream(texts, tokens=40, context=20, seed=99)
    resumed.restore(state)
    for batch in expected:
        again = resumed.next()
        assert torch.equal(batch.tokens, again.tokens) and batch.lengths == again.lengths


def test_files_are_found_in_an_order_that_the_file_system_does_not_decide(tmp_path):
    for name in ("b/z.py", "b/a.txt", "a.md", "c.bin", "test/t.py", "__pycache__/x.py", ".git/y.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert [path.relative_to(tmp_path).as_posix() for path in find_files(tmp_path)] == ["a.md", "b/a.txt", "b/z.py"]


def test_a_file_stays_on_its_side_when_others_come_and_its_copies_stand_beside_it(tmp_path):
    for index in range(60):
        (tmp_path / f"{index:02}.py").write_bytes(f"text number {index}".encode() * 3)
    before = load_corpus(tmp_path, validation=0.3)
    held = {bytes(text.tolist()) for text in before.validation}
    assert 0 < len(held) < 60 and not held & {bytes(text.tolist()) for text in before.train}
    (tmp_path / "000.py").write_bytes(b"a newcomer that sorts first")
    (tmp_path / "copy.py").write_bytes(sorted(held)[0])
    after = load_corpus(tmp_path, validation=0.3)
    assert held == {bytes(text.tolist()) for text in after.validation} - {b"a newcomer that sorts first"}
    assert before.fingerprint != after.fingerprint


def test_a_small_folder_still_holds_something_out(tmp_path):
    for index in range(3):
        (tmp_path / f"{index}.txt").write_text(f"text number {index}")
    corpus = load_corpus(tmp_path, validation=1e-9)
    assert (len(corpus.train), len(corpus.validation)) == (2, 1)
    (tmp_path / "1.txt").write_text("text number 0")
    (tmp_path / "2.txt").write_text("text number 0")
    with pytest.raises(ValueError, match="too little text to split"):
        load_corpus(tmp_path)


def test_a_single_file_is_cut_in_two(tmp_path):
    (tmp_path / "book.txt").write_bytes(bytes(range(100)))
    corpus = load_corpus(tmp_path / "book.txt", validation=0.1)
    assert bytes(corpus.train[0].tolist()) == bytes(range(90))
    assert bytes(corpus.validation[0].tolist()) == bytes(range(90, 100))


def test_every_machine_with_python_has_something_to_train_on():
    corpus = load_corpus()
    assert corpus.source == str(standard_library())
    assert corpus.train_bytes > 2_000_000 and corpus.validation_bytes > 50_000


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_data_that_is_not_there_is_named(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=f"data: .*{name}"):
        load_corpus(tmp_path / name)
