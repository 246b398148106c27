"""Training on text without sound, beside speech."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from imputer import alignments, models, training
from imputer.errors import UsageError
from imputer.training.batch_loss import BatchLoss
from imputer.training.step import text_batches
from imputer.training.text_only import Text
from imputer.vocabulary import Vocabulary
from trainings import settings_for

LINES = ["ba ba lu", "go da mi lu", "mi go go ba lu da", "lu"]


@pytest.fixture
def text(tmp_path: Path) -> Text:
    vocabulary = Vocabulary.train(LINES, size=20)
    (tmp_path / "text.txt").write_text("\n".join([*LINES, "", "Ünknown 7"]) + "\n")
    return Text([str(tmp_path / "text.txt")], vocabulary)


@pytest.mark.parametrize("merge_repeats", [False, True])
def test_rows_are_alignments_of_their_targets(text: Text, merge_repeats: bool) -> None:
    for step in range(30):
        batch = text.draw(0, step, 0, seconds=20.0, frame_seconds=0.08, merge_repeats=merge_repeats)
        frames = batch.features.shape[1]
        assert 0 < len(batch) * frames <= 20.0 / 0.08
        for name, target, length in zip(batch.ids, batch.targets, batch.target_lengths, strict=True):
            laid = batch.alignments[name]
            assert len(laid) == frames
            assert alignments.collapse(laid, merge_repeats=merge_repeats) == target[:length].tolist()
        fits = alignments.feasible(
            batch.targets, batch.feature_lengths, batch.target_lengths, merge_repeats=merge_repeats
        )
        assert fits.all()


def test_rows_are_read_from_the_start_of_a_line_on(text: Text) -> None:
    vocabulary = Vocabulary.train(LINES, size=20)
    starts = [" ".join(LINES[number:]) for number in range(len(LINES))]
    batch = text.draw(1, seconds=60.0, frame_seconds=0.08)
    for target, length in zip(batch.targets, batch.target_lengths, strict=True):
        read = vocabulary.decode(target[:length].tolist())
        assert read and any(whole.startswith(read) for whole in starts), read


def test_a_draw_depends_on_its_key_alone(text: Text) -> None:
    first, again, other = (text.draw(0, step, seconds=30.0, frame_seconds=0.08) for step in (1, 1, 2))
    assert first.alignments == again.alignments
    assert list(first.alignments.values()) != list(other.alignments.values())


def test_lines_of_another_form_are_counted(text: Text, tmp_path: Path) -> None:
    assert (text.lines, text.left_out) == (5, 1)
    (tmp_path / "numbers.txt").write_text("12 34\n")
    with pytest.raises(UsageError, match=r"numbers\.txt holds no line that the tokenizer can write"):
        Text([str(tmp_path / "numbers.txt")], Vocabulary.train(LINES, size=20))


def test_an_imputer_learns_from_text(corpus: str, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    """Text teaches the layers above the front end and nothing below them; the run says what it reads."""
    texts = [json.loads(line)["text"] for line in Path(corpus).read_text().splitlines()]
    (tmp_path / "text.txt").write_text("\n".join([*texts, "Ünknown 7"]))
    quiet = {"objective": "dynamic_programming", "steps": 60, "validate_every": 0, "log_every": 1}
    settings = settings_for(corpus, **quiet, text_share=1.0)
    settings = replace(
        settings,
        data=replace(settings.data, text=(str(tmp_path / "text.txt"),)),
        rollin=replace(settings.rollin, alignments="own", masking="block"),
    )
    training.train(settings, tmp_path / "run")
    assert "lines of text; 1 line left out, not in the form of the transcripts" in capfd.readouterr().err
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["text_loss"] for line in lines if "text_loss" in line]
    assert len(losses) == 60
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])

    network, vocabulary = models.load(tmp_path / "run" / "model")
    batch = Text([str(tmp_path / "text.txt")], vocabulary).draw(0, seconds=10.0, frame_seconds=0.08)
    loss, left_out = BatchLoss(network, settings, None)(batch, 0)
    loss.backward()
    assert left_out == [] and network.layers[0].qkv.weight.grad.abs().max() > 0
    assert all(weight.grad is None for weight in network.front_end.parameters())


def test_ranks_share_the_text_of_one(text: Text, corpus: str) -> None:
    def drawn(rank: int, count: int, batches: int) -> list[str]:
        run = SimpleNamespace(
            settings=settings_for(corpus, text_share=0.5),
            ranks=SimpleNamespace(rank=rank, count=count),
            progress=SimpleNamespace(step=3),
            text=text,
            model=SimpleNamespace(front_end=SimpleNamespace(frame_seconds=0.08), merge_repeats=False),
        )
        return [name for batch in text_batches(run, batches) for name in batch.ids]

    assert sorted(drawn(0, 2, 2) + drawn(1, 2, 2)) == sorted(drawn(0, 1, 4))


def test_text_needs_an_imputer_and_a_file(corpus: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"text_share needs data\.text: files to take it from"):
        training.train(settings_for(corpus, text_share=0.5), tmp_path)
    settings = settings_for(corpus, text_share=0.5)
    with pytest.raises(UsageError, match="text_share needs an Imputer"):
        training.train(replace(settings, data=replace(settings.data, text=("a.txt",))), tmp_path)
